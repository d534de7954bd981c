"""One worker or server of a kind of parameter server: a worker is told what to do, a server serves.

python -m servers.rank KIND FOLDER WORKERS SERVERS [PLACE PROCESSES]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ranks.meeting import Meeting
from ranks.rank import Rank, connect, die_with_parent, obey

if TYPE_CHECKING:
    from servers.contestant import Contestant

_WITHOUT_MPI = ("tensorflow",)


def _bind(contestant: Contestant) -> None:
    """Keep this process on a core of its own, where there are enough: two may else share one for long."""
    cores = sorted(os.sched_getaffinity(0))
    if contestant.size + contestant.servers <= len(cores):
        os.sched_setaffinity(0, {cores[contestant.rank]})


def main() -> None:
    """Start the worker or server."""
    die_with_parent()
    kind, folder, workers, servers, *place = sys.argv[1:]
    module = importlib.import_module(f"servers.over_{kind}")
    first = (Path(folder), int(place[0])) if kind in _WITHOUT_MPI else (0,)
    contestant: Contestant = module.Servers(*first, int(workers), int(servers))
    if kind not in _WITHOUT_MPI:
        _bind(contestant)
    stream = connect(folder)
    hello = {"rank": contestant.rank, "versions": contestant.versions, "serves": contestant.serves}
    if contestant.serves:
        print(json.dumps(hello), file=stream, flush=True)
        contestant.serve()
        stream.readline()
        return
    contestant.meet = Meeting(Path(folder, "counters"), contestant.rank, contestant.size).wait
    obey(stream, Rank(contestant, contestant.meet), hello)
    contestant.close()


if __name__ == "__main__":
    main()
