"""Prints what share of each folder was reached, from what `coverage json` wrote: lines, and branches of conditions.

python tools/coverage_by_folder.py results/coverage/files.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    """Add up the files of each folder, and of those within it."""
    folders: dict[Path, Counter[str]] = {}
    for file, measured in json.loads(Path(sys.argv[1]).read_text())["files"].items():
        numbers = {name: count for name, count in measured["summary"].items() if isinstance(count, int)}
        for folder in list(Path(file).parents)[:-1]:
            folders.setdefault(folder, Counter()).update(numbers)
    print(f"{'folder':<42} {'lines':>7} {'reached':>8} {'branches':>9} {'taken':>8}")
    for folder, counts in sorted(folders.items()):
        reached = _share(counts["covered_lines"], counts["num_statements"])
        taken = _share(counts["covered_branches"], counts["num_branches"])
        print(f"{folder!s:<42} {counts['num_statements']:>7} {reached:>8} {counts['num_branches']:>9} {taken:>8}")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


if __name__ == "__main__":
    main()
