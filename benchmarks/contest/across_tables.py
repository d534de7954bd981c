"""What `across_hosts.py` prints and records: times, bytes on the wire, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from record import text_of

from contest.targets import MPIS, Verdict

__all__ = ["Link", "Timing", "lines_of_timings", "row_of", "verdicts"]

_HEADERS: Final = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps, in every packet

_LEAST_GAIN: Final = 1.8  # of half the bytes

Rounds = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Link:
    """What joins the hosts.

    Attributes:
        hosts: How many.
        bits_per_second: The rate of each host's link, each way.
    """

    hosts: int
    bits_per_second: float

    @property
    def least_share(self) -> float:
        """Say how much of a message each host must send at least, to have it summed over all."""
        return 2 * (self.hosts - 1) / self.hosts

    def bound(self, nbytes: int) -> float:
        """Say how many seconds the links need for a message at least."""
        return self.least_share * nbytes * 8 / self.bits_per_second


@dataclass
class Timing:
    """One way and one message: a figure for each round.

    Attributes:
        peer: In whose environment.
        way: How it is summed.
        work: The size, as the user wrote it.
        nbytes: The size.
        seconds: The median of a round's steps, each as long as its slowest rank took.
        sent: Bytes that the host that sent the most of them sent in a step, with all headers.
        packets: Packets, likewise.
        steps: How many a round has.
    """

    peer: str
    way: str
    work: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    packets: list[float] = field(default_factory=list)
    steps: int = 0

    def add(self, measured: dict[str, Any]) -> None:
        """Take a round's figures, as `contest.across` prints them."""
        self.seconds.append(float(np.median(measured["seconds"])))
        self.sent.append(measured["sent"])
        self.packets.append(measured["packets"])
        self.steps = len(measured["seconds"])

    @property
    def shares(self) -> Rounds:
        """Bytes that were sent, in messages."""
        return np.array(self.sent) / self.nbytes

    @property
    def net_shares(self) -> Rounds:
        """The same without headers; a packet that only acknowledges has nothing else."""
        net: Rounds = np.array(self.sent) - _HEADERS * np.array(self.packets)
        return net / self.nbytes


def _ratios(theirs: Timing, ours: Timing) -> Rounds:
    """Divide round by round, as far as both came."""
    rounds = min(len(theirs.seconds), len(ours.seconds))
    ratios: Rounds = np.array(theirs.seconds[:rounds]) / np.array(ours.seconds[:rounds])
    return ratios


def _find(timings: Sequence[Timing], like: Timing, peer: str, way: str) -> Timing | None:
    return next((one for one in timings if (one.work, one.peer, one.way) == (like.work, peer, way)), None)


def _spread(rounds: Rounds) -> str:
    return f"{np.median(rounds):.2f} ({rounds.min():.2f} to {rounds.max():.2f})"


def lines_of_timings(timings: Sequence[Timing], link: Link) -> list[str]:
    """Make a table for each size: a row for each way."""
    lines = []
    for work in dict.fromkeys(one.work for one in timings):
        chosen = [one for one in timings if one.work == work]
        bound = text_of(link.bound(chosen[0].nbytes) * 1e6)
        lines += ["", f"{work}: the links need {bound} and {link.least_share:.3g} messages from each host"]
        heads = ("ms (low to high)", "/ bound", "sent", "/ least", "no headers", "raw / this")
        lines.append(f"{'':>30} | {heads[0]:>25} | " + " | ".join(f"{head:>10}" for head in heads[1:]))
        lines += [_line(one, timings, link) for one in chosen]
    return lines


def _line(timing: Timing, timings: Sequence[Timing], link: Link) -> str:
    times = np.array(timing.seconds) * 1e3
    middle = float(np.median(times))
    share, net_share = float(np.median(timing.shares)), float(np.median(timing.net_shares))
    numbers = [middle / 1e3 / link.bound(timing.nbytes), share, share / link.least_share, net_share / link.least_share]
    raw = _find(timings, timing, timing.peer, "raw")
    cells = [f"{number:>10.3f}" for number in numbers] + [_spread(_ratios(raw, timing)) if raw else f"{'-':>10}"]
    name = f"{timing.way} ({timing.peer})" if timing.peer in MPIS else timing.way
    return f"{name:>30} | {f'{middle:.1f} ({times.min():.1f} to {times.max():.1f})':>25} | " + " | ".join(cells)


def verdicts(timings: Sequence[Timing], link: Link) -> list[Verdict]:
    """Compare what was measured with what is asked; what is missed comes first, what is only shown last."""
    found = [one for ours in timings if ours.way == "mpidist" for one in _verdicts(ours, timings, link)]
    return sorted(found, key=lambda verdict: (False, True, None).index(verdict.is_met))


def _verdicts(ours: Timing, timings: Sequence[Timing], link: Link) -> Iterator[Verdict]:
    name = f"mpidist ({ours.peer})"
    for peer, way, least in ((ours.peer, "raw", 1.0), ("gloo", "gloo", 1.3)):
        theirs = _find(timings, ours, peer, way)
        if theirs:
            ratios = _ratios(theirs, ours)
            yield Verdict(
                f"{ours.work}: {way} / {name}", f">= {least}", _spread(ratios), bool(np.median(ratios) >= least)
            )
    to_bound = np.array(ours.seconds) / link.bound(ours.nbytes)
    yield _at_most(f"{ours.work}: {name} / bound of the link", to_bound, 1.15)
    # Headers are a twentieth by themselves, with 1500 bytes a packet, and no library can help it.
    yield _at_most(f"{ours.work}: bytes of {name} without headers / least", ours.net_shares / link.least_share, 1.05)
    yield Verdict(f"{ours.work}: bytes of {name} / least", "", _spread(ours.shares / link.least_share), None)
    reproducible = _find(timings, ours, ours.peer, "mpidist reproducible")
    if reproducible:
        yield _at_most(f"{ours.work}: reproducible / {name}", _ratios(reproducible, ours), 1.5)
    for half in ("bf16", "fp16"):
        compressed = _find(timings, ours, ours.peer, f"mpidist {half}")
        if compressed:
            ratios = _ratios(ours, compressed)
            met = bool(np.median(ratios) >= _LEAST_GAIN)
            yield Verdict(f"{ours.work}: {name} / compressed to {half}", f">= {_LEAST_GAIN}", _spread(ratios), met)
            share = compressed.net_shares / link.least_share
            yield _at_most(f"{ours.work}: bytes of {half} without headers / least of float32", share, 0.525)


def _at_most(text: str, rounds: Rounds, most: float) -> Verdict:
    return Verdict(text, f"<= {most}", _spread(rounds), bool(np.median(rounds) <= most))


def row_of(timing: Timing, timings: Sequence[Timing], link: Link) -> dict[str, str]:
    """Make one row of text for a way and a size."""
    microseconds, bound = np.array(timing.seconds) * 1e6, link.bound(timing.nbytes)
    row = {
        "work": timing.work,
        "bytes": str(timing.nbytes),
        "peer": timing.peer,
        "way": timing.way,
        "rounds": str(len(timing.seconds)),
        "steps": str(timing.steps),
        "us": f"{np.median(microseconds):.0f}",
        "us_low": f"{microseconds.min():.0f}",
        "us_high": f"{microseconds.max():.0f}",
        "us_rounds": " ".join(f"{one:.0f}" for one in microseconds),
        "bound_us": f"{bound * 1e6:.0f}",
        "ratio_to_bound": f"{np.median(microseconds) / 1e6 / bound:.4f}",
        "sent_bytes": f"{np.median(timing.sent):.0f}",
        "sent_packets": f"{np.median(timing.packets):.0f}",
        "sent_to_least": f"{np.median(timing.shares) / link.least_share:.4f}",
        "net_sent_to_least": f"{np.median(timing.net_shares) / link.least_share:.4f}",
    }
    raw = _find(timings, timing, timing.peer, "raw")
    if raw:
        ratios = _ratios(raw, timing)
        row |= {"ratio": f"{np.median(ratios):.4f}", "ratio_low": f"{ratios.min():.4f}"}
        row |= {"ratio_high": f"{ratios.max():.4f}"}
    return row
