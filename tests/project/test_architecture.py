"""The rules of the architecture, read from the source: who imports whom, and how large things grow.

How large the project may be as a whole, budget.cfg says: code belongs where it fits, not where there is room.
"""

import ast
import graphlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import mpidist

pytestmark = pytest.mark.no_mpi

PACKAGE = Path(mpidist.__file__).parent
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 40
MAX_MODULES = 16  # in a folder, besides its `__init__`
EXCEPTIONS = ("Exception", "Error", "Warning")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module."""

    target: str  # the module
    source: str  # where its name is taken from: the module itself, or the folder whose `__init__` has the name
    line: int  # where the import is


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self):
        return self.path.name == "__init__.py"

    @property
    def folder(self):
        """The package that the file lies in: of an `__init__`, the package that it makes."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def at(self, line):
        return f"{self.path.relative_to(PACKAGE.parent)}:{line}"

    def imports(self):
        return _imports(self.tree)

    def own_imports(self):
        return (found for found in self.imports() if found.target.split(".")[0] == "mpidist")


def _modules():
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, ast.parse(path.read_text()))
    return modules


def _imports(tree):
    """Yield all imports, also those of functions, and those for types alone."""
    for child in ast.walk(tree):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, alias.name, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                source, inner = str(child.module), f"{child.module}.{alias.name}"
                target = inner if inner in NAMES else source
                yield Import(target, source, child.lineno)


NAMES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
}
MODULES = _modules()


def is_in(name, package):
    return name == package or name.startswith(package + ".")


def test_package_was_found():
    """Else every rule below would hold."""
    assert len(MODULES) > 40
    assert sum(1 for module in MODULES.values() for _ in module.own_imports()) > 200
    edges = {found.target for found in MODULES["mpidist.strategies.mirrored"].own_imports()}
    assert {"mpidist.strategy", "mpidist.strategy_parts", "mpidist.replicas"} <= edges


def require_no_import(is_wrong):
    every = ((module, found) for module in MODULES.values() for found in module.imports())
    assert [
        f"{module.at(found.line)} imports {found.target}" for module, found in every if is_wrong(module, found)
    ] == []


def test_transport_imports_only_itself_and_errors():
    require_no_import(
        lambda module, found: (
            is_in(module.name, "mpidist.transport")
            and is_in(found.target, "mpidist")
            and not (is_in(found.target, "mpidist.transport") or found.target == "mpidist.errors")
        )
    )


def test_strategies_are_imported_by_the_tables_of_contents_alone():
    """And none by another: a strategy is a composition, never an override of another one."""
    require_no_import(
        lambda module, found: (
            is_in(found.target, "mpidist.strategies")
            and module.name not in ("mpidist", "mpidist.experimental")
            and not (module.is_package and is_in(module.name, "mpidist.strategies"))
        )
    )


def require_no_cycle(graph):
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def test_imports_make_no_cycle():
    """Of imports for types, too: who names another's class knows of it."""
    require_no_cycle({module.name: {found.target for found in module.own_imports()} for module in MODULES.values()})


def unit(name):
    """A module's folder; a module at the top is one by itself."""
    folder = MODULES[name].folder
    return name if folder == PACKAGE.name else folder


def test_folders_make_no_cycle():
    """Of imports for types, too. An `__init__` may name what is in folders within its own."""
    graph = {}
    for module in MODULES.values():
        for found in module.own_imports():
            one, other = unit(module.name), unit(found.target)
            is_seam = module.is_package and is_in(other, module.name)
            if one != other and not is_seam:
                graph.setdefault(one, set()).add(other)
    assert len(graph) > 15
    require_no_cycle(graph)


# Tables of contents of what users import. Every other name has one home.
TABLES_OF_CONTENTS = {
    "mpidist",
    "mpidist.checkpoint",
    "mpidist.cluster_resolver",
    "mpidist.coordinator",
    "mpidist.experimental",
    "mpidist.jax",
    "mpidist.nest",
    "mpidist.torch",
}


def test_names_are_imported_from_the_module_that_defines_them():
    """Else an import reads a folder's other modules, too, and hides where a name comes from."""
    assert {
        module.name for module in MODULES.values() if module.is_package and listed_names(module)
    } <= TABLES_OF_CONTENTS
    own = [(path, found) for path, _, tree in modules_of_tests() for found in _imports(tree)]
    own += [(module.at(found.line), found) for module in MODULES.values() for found in module.own_imports()]
    wrong = [
        f"{where} imports a name of {found.source}, which does not define it"
        for where, found in own
        if found.source == found.target and found.source in MODULES and MODULES[found.source].is_package
        if found.source not in TABLES_OF_CONTENTS
    ]
    assert wrong == []


def listed_names(module):
    """What a module's `__all__` has; none if there is none."""
    if module.name == PACKAGE.name:  # it makes its list of a table
        return mpidist.__all__
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_variables_of_launchers_are_named_in_one_module():
    """Else a launcher that changes is known here, and not there. The resolver of Slurm reads where its tasks lie."""
    pattern = re.compile(r'"(PMI_|PMIX_|OMPI_COMM_WORLD|MV2_COMM_WORLD|MPI_LOCAL|SLURM_STEP_NUM_TASKS|SLURM_PROCID)')
    naming = {module.name for module in MODULES.values() if pattern.search(module.path.read_text())}
    assert {name for name in naming if not is_in(name, "mpidist.cluster_resolver")} == {
        "mpidist.transport.mpi.launcher_variables"
    }


def test_folders_and_modules_stay_small():
    counts = Counter(module.folder for module in MODULES.values() if not module.is_package)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
    lengths = {module.at(1): len(module.path.read_text().splitlines()) for module in MODULES.values()}
    assert {name: length for name, length in lengths.items() if length > MAX_MODULE_LINES} == {}


def body_lines(function):
    """Count a function's lines without its signature and docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_stay_small():
    lengths = {
        f"{module.at(node.lineno)} {node.name}": body_lines(node)
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def is_without_definitions(module):
    return all(isinstance(node, (ast.Expr, ast.ImportFrom)) for node in module.tree.body)


def test_public_names_are_listed():
    wrong = []
    for module in MODULES.values():
        listed = listed_names(module)
        if not listed:
            wrong += [] if is_without_definitions(module) else [f"{module.at(1)} has no __all__"]
            continue
        defined = {
            node.name
            for node in module.tree.body
            if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_")
        }
        wrong += [f"{module.at(1)} does not list {name}" for name in sorted(defined - set(listed))]
        wrong += [f"{module.at(1)} lists a name twice"] * (len(set(listed)) < len(listed))
    assert wrong == []


def test_private_names_stay_in_their_files():
    wrong = [
        f"{module.at(node.lineno)} imports {alias.name}"
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mpidist")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert wrong == []


def test_modules_have_docstrings():
    for module in MODULES.values():
        first = (ast.get_docstring(module.tree) or "").splitlines()[:1]
        assert first, f"{module.at(1)} has no docstring"
        assert first[0].endswith((".", "?", "`")), f"{module.at(1)}: the first line is no sentence: {first[0]!r}"


def bases(node):
    return [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]


def decorators(node):
    return {ast.unparse(decorator).split("(")[0].rpartition(".")[2] for decorator in node.decorator_list}


def is_abstract(node):
    methods = [part for part in node.body if isinstance(part, Function)]
    has_members = any(isinstance(part, (ast.Assign, ast.AnnAssign)) for part in node.body)
    return (
        "ABC" in bases(node)
        or "Protocol" in bases(node)
        or any("abstractmethod" in decorators(method) for method in methods)
        or ("Enum" in bases(node) and not has_members)
    )


def test_classes_are_abstract_or_final():
    """The rule of the house. Kinds of error are neither: programs may refine them."""
    nodes = ((module, node) for module in MODULES.values() for node in ast.walk(module.tree))
    classes = [(module, node) for module, node in nodes if isinstance(node, ast.ClassDef)]
    final = {node.name for _, node in classes if "final" in decorators(node)}
    for module, node in classes:
        where = f"{module.at(node.lineno)} {node.name}"
        assert not set(bases(node)) & final, f"{where} subclasses a final class"
        if node.name.endswith(EXCEPTIONS) or "NamedTuple" in bases(node):
            continue
        assert (node.name in final) != is_abstract(node), f"{where} is neither abstract nor final, or both"


# The tests.

TESTS = Path(__file__).parents[1]


@cache
def modules_of_tests():
    """Return (path, name, tree) of all modules of tests, each with the name it would have inside mpidist."""
    inner = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("*.py"))]
    names = [".".join((PACKAGE.name, *path.with_suffix("").parts)) for path in inner]
    return [(str(path), name, ast.parse((TESTS / path).read_text())) for path, name in zip(inner, names, strict=True)]


def test_folders_of_tests_mirror_those_of_the_package():
    own = {"fixtures", "frameworks", "host_cuda", "jobs", "project", "random_programs", "slurm", "support"}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    mirrors = {folder for folder in folders if not own & {*folder.parts}}
    assert {folder for folder in mirrors if not (PACKAGE / folder / "__init__.py").exists()} == set()
    counts = Counter(str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("*.py") if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_names_of_tests_begin_with_their_feature():
    """With no article or clause; and programs in them report and match, they do not tell and know."""
    refused = re.compile(
        r"test_((an?|the|what|that|whatever|each|every)_|(\w+_)?(ask(ed)?|heard?|known?|learn|say|said|tell|told)s?(_|$))"
    )
    nodes = ((path, node) for path, _, tree in modules_of_tests() for node in ast.walk(tree))
    assert [
        f"{path} {node.name}" for path, node in nodes if isinstance(node, Function) and refused.match(node.name)
    ] == []


# Tests that touch what is private to another file: nothing public shows it, or makes it happen.
TOUCH_PRIVATES = {
    "collectives/test_device_overlap.py": {"_DIRECT_BYTES_OF_DEVICE"},
    "collectives/test_whole_calls.py": {"_timeout_seconds"},
    "frameworks/test_torch_process_group.py": {"_size"},
    "parameter_server/test_programs.py": {"_advance"},
    "replica_context/test_gpus_of_one_process.py": {"_compile_module_with_cache", "_kernel_memo"},
    "strategies/test_strategies.py": {"_value"},
    "transport/failures/test_deadlines.py": {"_ANSWER_SECONDS", "_pause"},
    "transport/failures/test_watch.py": {"_notes"},
    "transport/host_memory/test_result_memory.py": {"_is_gil_enabled"},
    "transport/node_memory/test_node_memory.py": {"_DIRECTORY", "_ORDERED"},
    "transport/test_half.py": {"_narrow"},
    "transport/trace/test_traces.py": {"_entered"},
}


def privates_of(tree):
    """Return the private names that a module asks other objects for, or puts something else in place of."""
    own = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (Function, ast.ClassDef))}
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    replaced = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) == 3
        if isinstance(node.args[1], ast.Constant)
    }
    return {name for name in (asked - own) | replaced if name.startswith("_") and not name.startswith("__")}


def test_tests_touch_few_privates():
    of_others = {"_asdict", "_exit", "_fields", "_replace"}  # of Python's own
    found = {
        path: privates_of(tree) - of_others
        for path, _, tree in modules_of_tests()
        if path.rpartition("/")[2].startswith("test_")
    }
    assert {path: names for path, names in found.items() if names} == TOUCH_PRIVATES
