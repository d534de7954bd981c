"""The pages: their code runs, their links lead somewhere, and the reference names everything.

A block of Python below `<!-- run -->` or `<!-- run: name.py -->` is a program. The programs of a page run in order, in
one folder, so that a later one can import an earlier one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import clean_environment

import mpidist

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in (ROOT / "README.md", *DOCS.rglob("*.md")) if "_build" not in page.parts)
PROGRAM = re.compile(r"^<!-- run(?:: (?P<name>\S+))? -->\n+```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def programs(page: Path) -> list[tuple[str, str]]:
    found = PROGRAM.finditer(page.read_text())
    return [(match["name"] or f"block_{number}.py", match["code"]) for number, match in enumerate(found)]


def anchors(page: Path) -> set[str]:
    """Return what GitHub and MyST make of the headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=named)
def test_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, code in programs(page):
        (tmp_path / name).write_text(code)
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, f"{name} of {named(page)}:\n{done.stdout}{done.stderr}"


def test_marks_are_found() -> None:
    """A mark that the pattern does not fit would be a program that nobody runs."""
    for page in PAGES:
        marks = re.findall(r"^<!-- run", page.read_text(), re.MULTILINE)
        assert len(marks) == len(programs(page)), named(page)
    assert programs(DOCS / "tutorial.md")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    for match in LINK.finditer(BLOCK.sub("", page.read_text())):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} links to {match['target']}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{named(page)} links to {match['target']}, which has no such heading"


def test_reference_names_everything_public() -> None:
    documented = set(re.findall(r"\w+", "".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))))
    public = [*mpidist.__all__, *mpidist.cluster_resolver.__all__, *mpidist.experimental.__all__]
    assert not [name for name in public if name not in documented]
