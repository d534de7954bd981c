"""What viewers of the Trace Event Format need of a file, and do not say if it lacks it."""

import gzip
import json
from typing import Any

__all__ = ["Event", "process_of", "read_events"]

Event = dict[str, Any]

_METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}


def process_of(rank):
    """Return the number of a rank's process in a merged trace: not 0, which Perfetto takes for the idle process."""
    return rank + 1


def read_events(path):
    """Read a merged trace, and check that it is one that viewers show as it was meant."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        whole = json.load(file)
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    named = set()
    for event in events:
        assert 0 < event["pid"] < 1 << 31
        if event["ph"] == "M":
            key, kind = _METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
            where = (event["pid"], event["tid"]) if event["name"] == "thread_name" else (event["pid"],)
            assert (event["name"] == "process_sort_index") or where not in named
            named.add(where)
        else:
            assert event["ph"] == "X"
            assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(event)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["tid"] > 0
            assert {(event["pid"],), (event["pid"], event["tid"])} <= named  # before their first slices
    _require_nesting(events)
    return events


def _require_nesting(events):
    """Slices of one thread lie within each other, or apart; a slice comes after what it lies in."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            begun = round(1000 * event["ts"])
            slices = threads.setdefault((event["pid"], event["tid"]), [])
            slices.append((begun, begun + round(1000 * event["dur"])))
    assert threads
    for slices in threads.values():
        open_until = []
        for begun, ended in sorted(slices, key=lambda one: one[0]):  # stable, as the viewers sort
            while open_until and open_until[-1] <= begun:
                open_until.pop()
            assert not open_until or ended <= open_until[-1]
            open_until.append(ended)
