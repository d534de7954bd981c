"""The settings of the environment: the `MPIDIST_` variables, read once when a strategy is built."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeVar, final

__all__ = ["LEAST_CHUNK_BYTES", "MOST_CHUNK_BYTES", "STACK_SIGNAL", "Settings", "unknown_settings"]

# Limits of the size of chunks in which device memory is staged through the host.
LEAST_CHUNK_BYTES: Final = 256 << 10
MOST_CHUNK_BYTES: Final = 8 << 20

STACK_SIGNAL: Final = signal.SIGRTMAX - 6  # few programs use signals in the middle of this range

_T = TypeVar("_T")
_LOG_LEVELS: Final[dict[str, str | None]] = {
    level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}

# All variables that the library reads, here and elsewhere.
_KNOWN: Final = (
    "MPIDIST_ALONE",
    "MPIDIST_CHECK",
    "MPIDIST_CHECK_VALUES",
    "MPIDIST_DEVICE_MPI",
    "MPIDIST_EXIT_CODE_FILE",
    "MPIDIST_FLIGHT_DIR",
    "MPIDIST_FLIGHT_SIGNAL",
    "MPIDIST_IO_TIMEOUT",
    "MPIDIST_LOG",
    "MPIDIST_NATIVE",
    "MPIDIST_NCCL",
    "MPIDIST_ON_ERROR",
    "MPIDIST_PRETEND_NODES",
    "MPIDIST_RESTARTS",
    "MPIDIST_RESULT_BYTES",
    "MPIDIST_SAVED_FILE",
    "MPIDIST_STACK_SIGNAL",
    "MPIDIST_STAGING_BYTES",
    "MPIDIST_STALL_SECONDS",
    "MPIDIST_STRAGGLER",
    "MPIDIST_TIMEOUT_SECONDS",
    "MPIDIST_TRACE",
    "MPIDIST_TRACEBACK",
    "MPIDIST_TRANSPORT",
    "MPIDIST_TUNE_DIR",
    "MPIDIST_UNLINK_MPI_FILES",
)

_FLIGHT_SIGNALS: Final[dict[str, str | None]] = {"USR1": "SIGUSR1", "USR2": "SIGUSR2", "OFF": None}
_TRANSPORTS: Final = {name: name for name in ("auto", "mpi", "shared_memory")}


@final
@dataclass(frozen=True)
class Settings:
    """The settings of a group of ranks, from the environment.

    Attributes:
        pretend_nodes: Node label of each rank of the world, or `None` for the real nodes.
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
        stack_signal: The signal at which a rank writes its stack, or `None`.
        trace: The folder for traces of all calls; "" for none.
        result_bytes: The most bytes of results that a rank keeps for later results; `None` for a quarter of its part of
            the node's memory.
        device_mpi: Whether to pass device memory to MPI between nodes: the user asserts that MPI is CUDA-aware.
        native: Whether the compiled part of the library may be used; read when the library is imported.
        unlink_mpi_files: Whether the files in which MPI shares memory lose their names after the start.
        io_timeout_seconds: The deadline of writing a checkpoint; `None` for that of calls, and 600 s in the background.
        check_values: In which runs of a strategy its variables are compared over ranks, each so many-th; 0 for none.
        restarts: How often this job was started again, by `mpidist run` and by Slurm.
    """

    pretend_nodes: tuple[int, ...] | None = None
    check: bool = True
    timeout_seconds: float | None = None
    abort_on_error: bool = True
    transport: str = "auto"
    log_level: str | None = None
    stall_seconds: float = 60.0
    straggler_seconds: float = 60.0
    nccl: bool = True
    staging_bytes: int = 0
    flight_signal: str | None = "SIGUSR1"
    stack_signal: int | None = STACK_SIGNAL
    trace: str = ""
    result_bytes: int | None = None
    device_mpi: bool = False
    native: bool = True
    unlink_mpi_files: bool = True
    io_timeout_seconds: float | None = None
    check_values: int = 0
    restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings.

        Raises:
            ValueError: If the value of a variable is invalid. The text names the variable.
        """
        _choice(environ, "MPIDIST_ALONE", {"1": True, "0": False}, default=False)  # which are read where they are used
        _choice(environ, "MPIDIST_TRACEBACK", {"full": True}, default=False)
        return cls(
            pretend_nodes=_nodes(environ, "MPIDIST_PRETEND_NODES"),
            check=_choice(environ, "MPIDIST_CHECK", {"1": True, "0": False}, default=True),
            timeout_seconds=_finite(_seconds(environ, "MPIDIST_TIMEOUT_SECONDS", 0.0)) or None,
            stall_seconds=_finite(_seconds(environ, "MPIDIST_STALL_SECONDS", 60.0)),
            straggler_seconds=_finite(_seconds(environ, "MPIDIST_STRAGGLER", 60.0)),
            abort_on_error=_choice(environ, "MPIDIST_ON_ERROR", {"abort": True, "raise": False}, default=True),
            transport=_choice(environ, "MPIDIST_TRANSPORT", _TRANSPORTS, default="auto"),
            nccl=_choice(environ, "MPIDIST_NCCL", {"1": True, "0": False}, default=True),
            staging_bytes=_bytes(environ, "MPIDIST_STAGING_BYTES", LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES) or 0,
            result_bytes=_bytes(environ, "MPIDIST_RESULT_BYTES", 0),
            flight_signal=_choice(environ, "MPIDIST_FLIGHT_SIGNAL", _FLIGHT_SIGNALS, "SIGUSR1", upper=True),
            stack_signal=_real_time_signal(environ, "MPIDIST_STACK_SIGNAL", STACK_SIGNAL),
            trace=os.path.expanduser(environ.get("MPIDIST_TRACE", "").strip()),
            device_mpi=_choice(environ, "MPIDIST_DEVICE_MPI", {"1": True, "0": False}, default=False),
            native=_choice(environ, "MPIDIST_NATIVE", {"1": True, "0": False}, default=True),
            unlink_mpi_files=_choice(environ, "MPIDIST_UNLINK_MPI_FILES", {"1": True, "0": False}, default=True),
            io_timeout_seconds=_finite(_seconds(environ, "MPIDIST_IO_TIMEOUT", 0.0)) or None,
            check_values=_count(environ, "MPIDIST_CHECK_VALUES", "runs"),
            restarts=sum(_count(environ, name, "restarts") for name in ("MPIDIST_RESTARTS", "SLURM_RESTART_COUNT")),
            log_level=_choice(environ, "MPIDIST_LOG", _LOG_LEVELS, None, upper=True),
        )

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


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Describe each unknown `MPIDIST_` variable, with the variable that may be meant."""
    texts = []
    for name in sorted(name for name in environ if name.startswith("MPIDIST_") and name not in _KNOWN):
        near = [known for known in _KNOWN if known.startswith(name)] or get_close_matches(name, _KNOWN, 1, cutoff=0.85)
        near = near or [known for known in _KNOWN if name.startswith(known)]
        texts.append(f"the variable {name} means nothing" + (f"; is {near[0]} meant?" if near else ""))
    return texts


def _choice(environ: Mapping[str, str], name: str, choices: dict[str, _T], default: _T, upper: bool = False) -> _T:
    text = environ.get(name, "").strip()
    if not text:
        return default
    text = text.upper() if upper else text
    if text not in choices:
        raise ValueError(f"{name}={environ[name]!r} is not understood; it is one of {', '.join(choices)}")
    return choices[text]


def _nodes(environ: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    text = environ.get(name, "").strip()  # 0,0,1,1
    if not text:
        return None
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError(
            f"{name}={environ[name]!r} is not understood; it is the node of each rank of the world, "
            "whole numbers with commas between them: 0,0,1,1"
        ) from None


def _real_time_signal(environ: Mapping[str, str], name: str, default: int) -> int | None:
    text = environ.get(name, "").strip().lower()
    if text == "off":
        return None
    least, most = int(signal.SIGRTMIN), int(signal.SIGRTMAX)
    if text and not (text.isdecimal() and least <= int(text) <= most):
        raise ValueError(f"{name}={environ[name]!r} is not understood; it is a signal from {least} to {most}, or off")
    return int(text or default)


def _seconds(environ: Mapping[str, str], name: str, default: _T) -> float | _T:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{name}={environ[name]!r} is not understood; it is a number of seconds >= 0")
    return seconds


def _finite(seconds: float) -> float:
    """Return a time, or 0, which is never, if threads cannot wait for so long."""
    return seconds if seconds < threading.TIMEOUT_MAX else 0.0


def _count(environ: Mapping[str, str], name: str, what: str) -> int:
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{name}={environ[name]!r} is not understood; it is a number of {what}, 0 for none")
    return int(text or 0)


def _bytes(environ: Mapping[str, str], name: str, least: int, most: float = math.inf) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or not least <= int(text) <= most:
        limits = f"{least} to {most}" if most < math.inf else f"{least} or more"
        raise ValueError(f"{name}={environ[name]!r} is not understood; it is a number of bytes, {limits}")
    return int(text)
