"""The pages: programs run and print what the pages show, links lead somewhere, and words stay within their budget."""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs.faults import environment
from mpi_session.launch import HANG_SECONDS, Launcher
from project.pages import BLOCK, Block, Command, blocks_of, difference

import mpidist

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted((ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")))
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
AT_ONCE = 3  # jobs that run at the same time: each waits now and then
# What the pages say of blocks that are not run, and how many there are of each.
NOT_RUN = {
    "a fragment": 1,
    "a part of a program": 3,
    "changes the library": 10,
    "for any program": 2,
    "installs packages": 6,
    "measures the machine": 4,
    "needs a GPU": 3,
    "needs a running job": 2,
    "needs h5py": 2,
    "needs jax": 2,
    "needs optax": 2,
    "needs Slurm": 4,
    "needs TensorFlow": 1,
    "needs torch": 12,
    "prints bits of one machine": 1,
    "takes minutes": 4,
}


class Ran(NamedTuple):
    """A command that came to its end."""

    command: Command
    status: int
    printed: str


def named(page):
    return str(page.relative_to(ROOT))


def place(block):
    return f"{named(block.page)}:{block.number}"


def is_run(block):
    return block.mark != "not run" and (not block.needs or find_spec(block.needs) is not None)


def commands_of(block):
    """Return what to do with a block. A program is run alone at least."""
    return block.commands if block.kind == "console" else [Command(f"python {block.word}")]


def is_done_elsewhere(block):
    """Whether another block of the page has a program run alone."""
    others = [other for other in CODE if other.page == block.page and other.kind == "console" and is_run(other)]
    return block.kind == "python" and any(commands_of(block)[0].line == c.line for o in others for c in o.commands)


CODE = [block for page in PAGES for block in blocks_of(page) if block.kind in ("python", "console")]
RUN = [block for block in CODE if is_run(block) and not is_done_elsewhere(block)]


def programs_of(page):
    return [block for block in CODE if block.page == page and block.kind == "python" and is_run(block)]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The environment of a person who reads the pages: the commands are those of these tests."""
    folder = tmp_path_factory.mktemp("bin")
    run = (sys.executable, "-m", "mpidist")
    for name, command in {"python": run[:1], "mpidist": run, "mpiexec": Launcher.find(None).command}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    own = {name: value for name, value in environment().items() if not name.startswith(("MPIDIST_", "PYTHONUN"))}
    return {**own, "PATH": f"{folder}:{own['PATH']}", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def jobs(request, environ, tmp_path_factory):
    """What the chosen tests will ask for, begun in advance, some at a time."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    blocks = [each.params["block"] for each in chosen if each is not None and "block" in each.params]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {block: pool.submit(run, block, tmp_path_factory.mktemp("page"), environ) for block in blocks}
        pool.shutdown(cancel_futures=True)


def run(block, folder, environ):
    """Run a block's commands one after the other, in a folder with the programs of its page."""
    assert commands_of(block), f"{place(block)} has no command; make it a block of text"
    for command in commands_of(block):
        assert command.is_safe, f"{place(block)} would run `{command.line}`; mark it `<!-- not run: why -->`"
    for program in programs_of(block.page):
        (folder / program.word).write_text(program.text)
    return [end_of(command, folder, environ) for command in commands_of(block)]


def end_of(command, folder, environ):
    with (folder / "printed").open("w+") as file:
        process = subprocess.Popen(
            ["bash", "-c", command.line],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(HANG_SECONDS)
        finally:
            process.kill()
        file.seek(0)
        return Ran(command, status, file.read())


def problem_of(block, ended):
    """Return what is not as the block shows it; nothing, if nothing."""
    for command, status, printed in ended:
        told = f"`{command.line}` at {place(block)} ended with exit status {status}, and printed\n{printed}"
        if not command.ends_with(status):
            return told
        if block.kind == "console" and difference(command, printed):
            return f"{difference(command, printed)}\n{told}"
    return ""


@pytest.mark.timeout(5 * HANG_SECONDS)
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{place(block)} {block.needs}".rstrip())
def test_block_prints_the_output_on_its_page(block, jobs):
    problem = problem_of(block, jobs[block].result())
    assert problem == "", problem


ALONE, MANY = "python a.py", "mpiexec -n 2 python a.py"
ERROR = '[rank 1 on node1]   File "/tmp/a.py", line 3, in step\n[rank 1 on node1] KeyError: 7'
TRACEBACK = "[rank 1 on node1] Traceback (most recent call last):"
SAID = "[rank 0 on node1] PeerFailedError: rank 1\n  has ended"
OWN_FRAME = f'[rank 1 on node1]   File "{mpidist.__file__}", line 9, in run\n[rank 1 on node1]     fn()\n'
OF_OPEN_MPI = "{0}\nMPI_ABORT was invoked on\n[1]\n{0}\n{0}\nprterun has exited\n{0}\n\0".format("-" * 74)


@pytest.mark.parametrize(
    ("line", "shown", "printed", "is_same"),
    [
        (ALONE, "one\ntwo", "one\ntwo\n", True),
        (ALONE, "one\ntwo", "two\none\n", False),
        (MANY, "one\ntwo", "two\none\n", True),
        (MANY, "one\none", "one\n", False),
        (MANY, "one", "one\none\n", False),
        (MANY, "one", "", False),
        (ALONE, "took 2.5 s at 0x7f0102030405 on laptop", "took 12 s at 0x7f9102030405 on node1", True),
        (ALONE, "loss 0.5", "loss 0.6", False),
        (ALONE, "a line that\n  is broken", "a line that is broken", True),
        (ALONE, "one ...\nthree", "one two\nthree", True),
        (ALONE, "one\n...\nfour", "one\ntwo\nthree\nfour", True),
        (ALONE, "one\n...\nfour", "one\ntwo\nthree", False),
        (MANY, ERROR, ERROR.replace("/tmp/", "/home/you/"), True),
        (MANY, ERROR, OWN_FRAME + ERROR, True),
        (MANY, f"{SAID}\n{TRACEBACK}\n{ERROR}", f"{TRACEBACK}\n{ERROR}", True),
        (MANY, f"{SAID}\n{TRACEBACK}\n{ERROR}", f"{SAID.splitlines()[0]} and more\n{TRACEBACK}\n{ERROR}", False),
        (MANY, f"{SAID}\n{TRACEBACK}\n{ERROR}", SAID.replace("\n ", ""), False),
        (MANY, ERROR, f"{ERROR}\n{OF_OPEN_MPI}", True),
        (MANY, ERROR, f"{OF_OPEN_MPI.replace('[1]', ERROR)}", True),
        (MANY, ERROR, f"{ERROR}\n{OF_OPEN_MPI}[rank 1 on laptop] more", False),
        (MANY, ERROR, f"{ERROR}\nAbort(1) on node 0 (rank 0 in comm 0): MPI_Abort", True),
        (MANY, ERROR, "\n".join(reversed(ERROR.splitlines())), False),
        (MANY, ERROR, ERROR.replace("line 3", "line 4"), False),
        (MANY, ERROR, ERROR.replace("rank 1", "rank 0"), False),
    ],
)
def test_difference_of_output_is_found(line, shown, printed, is_same):
    assert (difference(Command(line, tuple(shown.splitlines())), printed) == "") == is_same


def test_commands_that_could_do_harm_are_not_run(tmp_path):
    for line in ("pip install x", "python a.py; rm -r .", "kill 1", "python a.py > b", "sbatch a.py", "python -m pip"):
        assert not Command(line).is_safe
    block = Block(DOCS / "index.md", 1, "console", "", "", "", "$ touch it\n")
    with pytest.raises(AssertionError, match="would run `touch it`"):
        run(block, tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_reasons_of_blocks_that_are_not_run():
    """Nothing is left out in silence: what is left out, here or where a module is missing, stands above."""
    needed = Counter(f"needs {block.needs}" for block in CODE if block.needs)
    assert needed + Counter(block.word for block in CODE if block.mark == "not run") == NOT_RUN


def test_code_is_marked_and_found():
    """A mark that the pattern does not fit would be a program that nobody runs, and so would a name used twice."""
    for page in PAGES:
        text, blocks = page.read_text(), [block for block in CODE if block.page == page]
        marked = [block for block in blocks if block.mark]
        assert len(re.findall(r"^\s*<!-- (?:not )?run", text, re.MULTILINE)) == len(marked), named(page)
        assert len(re.findall(r"^\s*```(?:python|console)", text, re.MULTILINE)) == len(blocks), named(page)
        assert [place(block) for block in blocks if block.kind == "python" and not block.mark] == []
        names = Counter(program.word for program in programs_of(page))
        assert set(names.values()) <= {1}, f"{named(page)}: {names}"
    assert len(RUN) > 50


def anchors(page):
    """Return what GitHub and MyST make of the headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=named)
def test_links_lead_to_files(page):
    for match in LINK.finditer(BLOCK.sub("", page.read_text())):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} links to {match['target']}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{named(page)} links to {match['target']}, which has no such heading"


def test_reference_names_everything_public():
    documented = set(re.findall(r"\w+", "".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))))
    modules = mpidist, mpidist.checkpoint, mpidist.cluster_resolver, mpidist.experimental
    public = [name for module in modules for name in module.__all__]
    for module in ("jax", "torch"):  # read, as these are not installed everywhere
        text = (Path(mpidist.__file__).parent / module / "__init__.py").read_text()
        public += re.findall(r'"(\w+)"', text.partition("__all__ = ")[2])
    assert not [name for name in public if name not in documented]


def test_page_on_tensorflow_lists_nothing_as_absent_that_is_there():
    page = (DOCS / "from_tensorflow.md").read_text()
    absent = re.findall(r"^\| `(\w+)`[^|]* \| no[^|]* \|", page, re.M)
    assert "TPUStrategy" in absent
    assert not [name for name in absent if hasattr(mpidist, name)]


def test_pages_stay_short():
    """A number here may fall; a commit that raises it gives the reason."""
    words = {page: len(page.read_text().split()) for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.rst"))}
    assert max(words.values()) <= 5_500
    assert len(re.findall(r"\S*\w\S*", (ROOT / "README.md").read_text())) <= 700


# Marks of a dialect: people verbs for programs, "beside" for "compared with", and strings in upper case.
UNWANTED = re.compile(
    r"(?<!-)\bbeside\b|\blets? go\b|\b(?:comes?|serves?|knows?) (?:it |a \w+ )?again\b"
    r'|(?<!implementation=)"(?:SUM|MEAN|MIN|MAX|PROD|NONE|ON_READ|AUTO|RING|NCCL|FILE|DATA|OFF|PER_REPLICA|PER_WORKER)"'
)


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=named)
def test_page_keeps_to_the_style(page):
    assert UNWANTED.findall(page.read_text()) == []


def test_performance_page_is_that_of_its_numbers():
    sys.path.append(str(ROOT / "benchmarks"))
    from page import text_of_page

    assert (DOCS / "performance.md").read_text() == text_of_page(), "write it with `python benchmarks page`"


def test_architecture_names_files_that_exist():
    table = (DOCS / "architecture.md").read_text().partition("## Where to change what")[2].partition("## ")[0]
    files = {path.name for path in Path(mpidist.__file__).parent.rglob("*.*")}
    assert [name for name in re.findall(r"(\w+\.(?:py|c|sh))`", table) if name not in files] == []
