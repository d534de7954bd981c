"""The ranks of one library, asleep but for their turn."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final, TextIO

from hosts import Hosts

from harness.environments import Peer, commands, environment_of
from harness.rank import die_with_parent

_START_SECONDS: Final = 180
_STEP_SECONDS: Final = 300
_END_SECONDS: Final = 5


class GroupError(RuntimeError):
    """A rank failed, or did not answer."""


class Group:
    """The ranks of one library, started by the Python of its environment on this machine or on hosts."""

    def __init__(self, peer: Peer, python: Path, ranks: int, hosts: Hosts | None = None) -> None:
        self.peer, self.ranks = peer, ranks
        self.versions: dict[str, str] = {}
        self.failure = ""
        self._folder = Path(tempfile.mkdtemp(prefix="peers-"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / "socket"))
        self._server.listen(ranks)
        self._streams: list[TextIO] = []
        self._unasked: list[TextIO] = []
        self.pids: list[int] = []
        variables = environment_of(peer, ranks, "eth0" if hosts else "")
        with (self._folder / "log").open("w") as log:
            self._started = [
                subprocess.Popen(
                    command, cwd=self._folder, env=variables,  # nothing is imported from where the user stands
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent, start_new_session=True,
                )
                for command in commands(peer, python, ranks, self._folder, hosts)
            ]  # fmt: skip

    def join(self) -> None:
        """Wait until all ranks are there, or raise `GroupError`, and let them sleep."""
        limit = time.monotonic() + _START_SECONDS
        self._server.settimeout(0.5)
        while len(self._streams) < self.ranks:
            if time.monotonic() > limit or any(one.poll() is not None for one in self._started):
                raise GroupError(f"did not start\n{self._log()}")
            with contextlib.suppress(TimeoutError):
                connection = self._server.accept()[0]
                connection.settimeout(_STEP_SECONDS)
                self._streams.append(connection.makefile("rw"))
                # As this process numbers it: a rank of a host has another number there.
                seen = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                self.pids.append(struct.unpack("3i", seen)[0])
        hellos = self._answers()
        self.versions = next(hello["versions"] for hello in hellos if hello["rank"] == 0)
        # A parameter server serves its workers, and nobody else.
        self._unasked = [stream for stream, hello in zip(self._streams, hellos, strict=True) if hello["serves"]]
        self._streams = [stream for stream in self._streams if stream not in self._unasked]
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Wake all ranks, let them execute a command together, and return their replies, or raise `GroupError`."""
        command = json.dumps({"do": do, **arguments})
        self._signal(signal.SIGCONT)
        for stream in self._streams:
            with contextlib.suppress(OSError):  # it is seen when it does not answer
                print(command, file=stream, flush=True)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return answers

    def close(self) -> None:
        """Wake all ranks and let them go; kill those that do not."""
        self._signal(signal.SIGCONT)
        for stream in (*self._streams, *self._unasked):
            with contextlib.suppress(OSError):
                stream.close()
        self._server.close()
        limit = time.monotonic() + _END_SECONDS
        while time.monotonic() < limit and any(one.poll() is None for one in self._started):
            time.sleep(0.02)
        for one in self._started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)  # the leader of a session; its ranks die with it
                one.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for stream in self._streams:
            try:
                line = stream.readline()
            except OSError as error:
                raise GroupError(f"no answer: {error}\n{self._log()}") from error
            if not line:
                raise GroupError(f"a rank died\n{self._log()}")
            answers.append(json.loads(line))
            if "error" in answers[-1]:
                raise GroupError(answers[-1]["error"])
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _log(self) -> str:
        text = (self._folder / "log").read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-15:])
