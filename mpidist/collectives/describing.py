"""A call in few words for people, and in fields for ranks that compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mpidist.collectives.plan import Spec
from mpidist.collectives.signature import Request
from mpidist.nest import array_names, form_text
from mpidist.transport import count_text, name_ranks, size_text

__all__ = ["describe", "packs_text", "specs_text"]


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Say which arrays these are: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {size_text(nbytes)}"


def packs_text(num_packs: int, is_stream: bool) -> str:
    """Say in which form arrays travel, after other words."""
    return ", in a stream" if is_stream else f", {count_text(num_packs, 'pack')}"


def describe(
    request: Request, specs: Sequence[Spec], together: int, configuration: tuple[Any, ...]
) -> Mapping[str, str]:
    """Say what all ranks must agree on about a call.

    Args:
        request: What the caller asks for.
        specs: The arrays.
        together: A number that is 0 if no `out` is one array for all ranks of a node.
        configuration: Of the algorithm.
    """
    options = request.options
    fields = {
        "cross_device_ops": str(configuration),
        "out of all ranks of a node": "some" if together else "none",
        "op": str(request.op),
        "number of arrays": str(len(specs)),
        "bytes_per_pack": str(options.bytes_per_pack),
        "implementation": str(options.implementation),
        "reproducible": str(options.reproducible),
        "compression": str(options.compression),
        "compress_everywhere": str(options.compress_everywhere),
    }
    if request.destinations is None:
        structures, kept = (request.structure,), (request.mirrored,)
    else:
        fields["destinations"] = "; ".join(name_ranks(ranks) for ranks in request.destinations)
        structures, kept = request.structure, request.mirrored
    names, mirrored = _names_of(structures, kept)
    fields["mirrored"] = ", ".join(mirrored) or "none"
    forms = "; ".join(map(form_text, structures))
    fields |= {name: repr(spec) for name, spec in zip(names, specs, strict=True)}
    return fields | {"form of the nest": forms}


def _names_of(structures: Sequence[Any], kept: Sequence[Sequence[int]]) -> tuple[list[str], list[str]]:
    """Name the arrays of nests that travel, and those that are mirrored."""
    travelling: list[str] = []
    mirrored: list[str] = []
    for index, (structure, places) in enumerate(zip(structures, kept, strict=True)):
        pair = f"pair {index}, " if len(structures) > 1 else ""
        for place, name in enumerate(array_names(structure)):
            (mirrored if place in places else travelling).append(pair + name)
    return travelling, mirrored
