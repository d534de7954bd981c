"""The settings of the environment: the `MPIDIST_` variables, read once when a strategy is built."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, final

__all__ = ["LEAST_CHUNK_BYTES", "MOST_CHUNK_BYTES", "STACK_SIGNAL", "Settings", "unknown_settings"]

# Limits of the size of chunks in which device memory is staged through the host.
LEAST_CHUNK_BYTES: Final = 256 << 10
MOST_CHUNK_BYTES: Final = 8 << 20

STACK_SIGNAL: Final = signal.SIGRTMAX - 6  # few programs use signals in the middle of this range


@final
class _Kind(NamedTuple):
    """A kind of values. `convert` raises an error for any other text, and `rule` says what is needed: "it is ..."."""

    convert: Callable[[str], Any]
    rule: str

    def read(self, environ: Mapping[str, str], name: str, default: Any) -> Any:
        """Read a variable, which may be empty or missing."""
        text = environ.get(name, "").strip()
        try:
            return self.convert(text) if text else default
        except (KeyError, ValueError):
            raise ValueError(f"{name}={environ[name]!r} is not understood; it is {self.rule}") from None


def _one_of(choices: Mapping[str, Any]) -> _Kind:
    return _Kind(choices.__getitem__, f"one of {', '.join(choices)}")


def _in_any_case(choices: Mapping[str, Any]) -> _Kind:
    return _Kind(lambda text: choices[text.upper()], _one_of(choices).rule)


def _number_of(what: str, least: int = 0, most: float = math.inf) -> _Kind:
    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return _Kind(convert, f"a number of {what}")


def _seconds_of(text: str) -> float:
    """Return a time, or 0, which is never, if threads cannot wait for so long."""
    seconds = float(text)
    if math.isnan(seconds) or seconds < 0:
        raise ValueError
    return seconds if seconds < threading.TIMEOUT_MAX else 0.0


_LEAST_SIGNAL: Final = int(signal.SIGRTMIN)
_MOST_SIGNAL: Final = int(signal.SIGRTMAX) - 1  # two in a row are used
_REAL_TIME: Final = _number_of("signals", _LEAST_SIGNAL, _MOST_SIGNAL)

_SWITCH: Final = _one_of({"1": True, "0": False})
_SECONDS: Final = _Kind(_seconds_of, "a number of seconds >= 0")
_DEADLINE: Final = _Kind(lambda text: _seconds_of(text) or None, _SECONDS.rule)


def _of_each_rank(what: str) -> _Kind:
    rule = f"the {what} of each rank of the world, whole numbers with commas between them: 0,0,1,1"
    return _Kind(lambda text: tuple(map(int, text.split(","))), rule)


_SIGNAL: Final = _Kind(
    lambda text: None if text.lower() == "off" else _REAL_TIME.convert(text),
    f"a signal from {_LEAST_SIGNAL} to {_MOST_SIGNAL}, or off",
)
_FLIGHT_SIGNAL: Final = _in_any_case({"USR1": "SIGUSR1", "USR2": "SIGUSR2", "OFF": None})
_LOG_LEVEL: Final = _in_any_case({level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")})
_TRANSPORT: Final = _one_of({name: name for name in ("auto", "mpi", "shared_memory")})
_CHUNK: Final = _number_of(f"bytes, {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES}", LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES)
_RESTARTS: Final = _number_of("restarts, 0 for none")

# Variables that are checked here, and read where they are used.
_CHECKED: Final = {"MPIDIST_ALONE": _SWITCH, "MPIDIST_NATIVE": _SWITCH, "MPIDIST_TRACEBACK": _one_of({"full": True})}
_READ_ELSEWHERE: Final = ("MPIDIST_EXIT_CODE_FILE", "MPIDIST_FLIGHT_DIR", "MPIDIST_SAVED_FILE", "MPIDIST_TUNE_DIR")


def _variable(name: str, kind: _Kind, default: Any = None) -> Any:
    """Make the field of a setting, which a variable of the environment sets."""
    return field(default=default, metadata={"variable": name, "kind": kind})


@final
@dataclass(frozen=True)
class Settings:
    """The settings of a group of ranks, from the environment.

    Attributes:
        pretend_nodes: Node label of each rank of the world, or `None` for the real nodes.
        pretend_caches: The label of the last-level cache of each rank of the world, or `None` for the real ones.
        check: Whether ranks compare their calls before data moves.
        timeout_seconds: The deadline of calls without `timeout_seconds` of their own; `None` waits for ever.
        abort_on_error: Whether an uncaught exception on one rank ends the whole job.
        transport: `"mpi"`, `"shared_memory"` or `"auto"`: how the ranks of a node communicate.
        log_level: Level for the `mpidist` loggers, or `None` to leave logging alone.
        nccl: Whether NCCL may be used for device memory.
        stall_seconds: When to warn of a wait without a deadline, in seconds; 0 never.
        straggler_seconds: How often to log which rank the others wait for, at most, in seconds; 0 never.
        staging_bytes: Size of the chunks in which device memory is staged through the host; 0 to compute the best.
        flight_signal: The signal at which flight recorders are written, or `None`.
        stack_signal: The first of the two signals at which a rank writes its stack, or `None`.
        trace: The folder for traces of all calls; "" for none.
        result_bytes: The most bytes of results that a rank keeps for later results; `None` for a quarter of its part of
            the node's memory.
        device_mpi: Whether to pass device memory to MPI between nodes: the user asserts that MPI is CUDA-aware.
        unlink_mpi_files: Whether the files in which MPI shares memory lose their names after the start.
        io_timeout_seconds: The deadline of writing a checkpoint; `None` for that of calls, and 600 s in the background.
        check_values: In which runs of a strategy its variables are compared over ranks, each so many-th; 0 for none.
        own_restarts: How often `mpidist run` has started this job again; `slurm_restarts`: how often Slurm has.
    """

    pretend_nodes: tuple[int, ...] | None = _variable("MPIDIST_PRETEND_NODES", _of_each_rank("node"))
    pretend_caches: tuple[int, ...] | None = _variable("MPIDIST_PRETEND_CACHES", _of_each_rank("cache"))
    check: bool = _variable("MPIDIST_CHECK", _SWITCH, True)
    timeout_seconds: float | None = _variable("MPIDIST_TIMEOUT_SECONDS", _DEADLINE)
    abort_on_error: bool = _variable("MPIDIST_ON_ERROR", _one_of({"abort": True, "raise": False}), True)
    transport: str = _variable("MPIDIST_TRANSPORT", _TRANSPORT, "auto")
    log_level: str | None = _variable("MPIDIST_LOG", _LOG_LEVEL)
    nccl: bool = _variable("MPIDIST_NCCL", _SWITCH, True)
    stall_seconds: float = _variable("MPIDIST_STALL_SECONDS", _SECONDS, 60.0)
    straggler_seconds: float = _variable("MPIDIST_STRAGGLER", _SECONDS, 60.0)
    staging_bytes: int = _variable("MPIDIST_STAGING_BYTES", _CHUNK, 0)
    flight_signal: str | None = _variable("MPIDIST_FLIGHT_SIGNAL", _FLIGHT_SIGNAL, "SIGUSR1")
    stack_signal: int | None = _variable("MPIDIST_STACK_SIGNAL", _SIGNAL, STACK_SIGNAL)
    trace: str = _variable("MPIDIST_TRACE", _Kind(os.path.expanduser, "a folder"), "")
    result_bytes: int | None = _variable("MPIDIST_RESULT_BYTES", _number_of("bytes, 0 or more"))
    device_mpi: bool = _variable("MPIDIST_DEVICE_MPI", _SWITCH, False)
    unlink_mpi_files: bool = _variable("MPIDIST_UNLINK_MPI_FILES", _SWITCH, True)
    io_timeout_seconds: float | None = _variable("MPIDIST_IO_TIMEOUT", _DEADLINE)
    check_values: int = _variable("MPIDIST_CHECK_VALUES", _number_of("runs, 0 for none"), 0)
    own_restarts: int = _variable("MPIDIST_RESTARTS", _RESTARTS, 0)
    slurm_restarts: int = _variable("SLURM_RESTART_COUNT", _RESTARTS, 0)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings.

        Raises:
            ValueError: If the value of a variable is invalid. The text names the variable.
        """
        for name, kind in _CHECKED.items():
            kind.read(environ, name, None)
        sources = ((its, its.metadata["kind"], its.metadata["variable"]) for its in fields(cls))
        return cls(**{its.name: kind.read(environ, name, its.default) for its, kind, name in sources})

    @classmethod
    def or_default(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings; return the defaults if one is invalid: building a strategy raises that on all ranks."""
        try:
            return cls.from_environment(environ)
        except ValueError:
            return cls()

    @property
    def restarts(self) -> int:
        """How often this job was started again."""
        return self.own_restarts + self.slurm_restarts

    def apply_log_level(self) -> None:
        """Make the `mpidist` loggers write to standard error at the level of `MPIDIST_LOG`, if it is set."""
        if self.log_level is None:
            return
        logger = logging.getLogger("mpidist")
        logger.setLevel(self.log_level)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("mpidist %(levelname)s %(message)s"))
            logger.addHandler(handler)


_KNOWN: Final = sorted({*(its.metadata["variable"] for its in fields(Settings)), *_CHECKED, *_READ_ELSEWHERE})


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Describe each unknown `MPIDIST_` variable, with the variable that may be meant."""
    texts = []
    for name in sorted(name for name in environ if name.startswith("MPIDIST_") and name not in _KNOWN):
        near = [known for known in _KNOWN if known.startswith(name)] or get_close_matches(name, _KNOWN, 1, cutoff=0.85)
        near = near or [known for known in _KNOWN if name.startswith(known)]
        texts.append(f"the variable {name} means nothing" + (f"; is {near[0]} meant?" if near else ""))
    return texts
