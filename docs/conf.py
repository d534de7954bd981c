"""How Sphinx builds these pages: python -m sphinx -W --keep-going -b html docs docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpidist

project = "mpidist"
author = "mpidist developers"
release = version = mpidist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mpidist {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3

# The button copies commands without the prompt, and without their output.
copybutton_prompt_text = "$ "

napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
default_role = "code"  # docstrings write `name` as Markdown does

nitpick_ignore_regex = [
    # Python's and other libraries' types in signatures, whose inventories would need the network
    (r"py:.*", r"(typing|collections|contextlib|enum|numpy|np|mpi4py|MPI|types)(\..*)?"),
    (r"py:.*", r"(Any|Callable|Iterable|Iterator|Mapping|MutableMapping|Sequence|AbstractContextManager|Intracomm)"),
    (r"py:.*", r"(NamedTuple|Enum|ABC|dtype|ndarray|collections\.abc\..*|abc\..*)"),
]


def keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo that napoleon takes the words before a colon in a property's first line for its type."""
    types = [at for at, line in enumerate(lines) if line.startswith(":type: ")]
    if what == "property" and types:
        words = lines.pop(types[0]).removeprefix(":type: ")
        lines[0] = f"{words}: {lines[0]}"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_colons, priority=600)  # after napoleon, at 500
