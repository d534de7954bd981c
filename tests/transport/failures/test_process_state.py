"""What is read of a process: whether it is alive, and the one that was meant."""

import os
import signal
import subprocess
import sys

import pytest

from mpidist.transport.failures.status_board import GONE, RUNNING, STOPPED, UNKNOWN, Process

pytestmark = pytest.mark.no_mpi


def test_process_state_is_that_of_the_process_that_was_meant():
    own = Process.own()
    assert own.state(seen_from=own) == RUNNING
    assert own._replace(begun=own.begun + 1).state(seen_from=own) == GONE  # a later process has its id
    assert own.state(seen_from=own._replace(namespace=own.namespace + 1)) == UNKNOWN
    assert own._replace(namespace=0).state(seen_from=own._replace(namespace=0)) == UNKNOWN


def test_process_state_follows_signals():
    own = Process.own()
    code = f"from {Process.__module__} import Process; print(*Process.own(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        process = Process(*map(int, child.stdout.readline().split()))
        assert process.state(seen_from=own) == RUNNING
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process.state(seen_from=own) == STOPPED
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.state(seen_from=own) == GONE  # though its parent has not waited for it
    assert process.state(seen_from=own) == GONE
