"""Stacks of other processes of the machine: read while these compute, wait or sleep, and no process is harmed."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial

import pytest
from mpi_session import clean_environment

from mpidist.transport import stacks
from mpidist.transport.settings import STACK_SIGNAL
from mpidist.transport.stacks import Frame, Stack, StackFile, places_text, read_stacks, together

pytestmark = pytest.mark.no_mpi

PUBLISH = f"""
import ctypes, os, signal, sys, threading, time
from mpidist.transport.settings import STACK_SIGNAL
from mpidist.transport.stacks import publish_stack, withdraw_stack
def publish(number=STACK_SIGNAL):
    publish_stack(number, 3, 8, {os.getpid()}, "4711")
def show(*words):
    print(*words, flush=True)
"""
BUSY = """
publish()
def busy():
    {}
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
show("ready")
busy()
"""


@pytest.fixture
def start():
    """Start a Python program behind PUBLISH, and wait for its first line."""
    with ExitStack() as stack:

        def start_one(body, options=()):
            command, pipe = [sys.executable, *options, "-c", PUBLISH + body], subprocess.PIPE
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=clean_environment())
            stack.callback(child.communicate)
            stack.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            return child

        yield start_one


def functions_of(child, until=""):
    """Read a child's stack, again and again until the innermost function has a name. The test's limit ends it."""
    functions = []
    while not functions or (until and functions[0] != until):
        functions = [frame.function for frame in read_stacks([child.pid]).get(child.pid, Stack()).frames]
    return functions


@pytest.mark.core
@pytest.mark.parametrize(
    ("does", "options"),
    [("while True: pass", []), ("time.sleep(600)", ["-X", "faulthandler"]), ("sum(range(10**12))", [])],
)
def test_stack_is_read_of_a_process_that_does_not_answer_otherwise(start, does, options):
    child = start(BUSY.format(does), options)
    assert functions_of(child, until="busy") == ["busy", "<module>"]
    assert functions_of(child) == ["busy", "<module>"], "the wait has ended"
    assert child.poll() is None


@pytest.mark.parametrize(("does", "is_in_c"), [("while True: pass", False), ("sum(range(10**12))", True)])
def test_stack_of_a_process_that_runs_python_is_not_read_in_a_signal_handler(start, does, is_in_c):
    child = start(BUSY.format(does))
    assert functions_of(child, until="busy") == ["busy", "<module>"]
    file = StackFile.of(child.pid)
    os.truncate(file.path, 0)
    for _ in range(20):
        assert functions_of(child) == ["busy", "<module>"]
    with open(file.path) as written:
        assert ("Stack (" in written.read()) == is_in_c


def test_stack_is_that_of_the_thread_that_published_it(start):
    child = start(
        "def build():\n    publish()\n    show('ready')\n    time.sleep(600)\nthreading.Thread(target=build).start()\n"
    )
    assert functions_of(child, until="build")[0] == "build"


def test_stack_of_a_stopped_process_is_not_awaited(start):
    child = start(BUSY.format("time.sleep(600)"))
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert read_stacks([child.pid]) == {child.pid: Stack((), "it is stopped, by a signal or a debugger")}


@pytest.mark.parametrize(
    "body",
    [
        "publish()\nsignal.signal(STACK_SIGNAL, show)\npublish()\n",
        "signal.signal(STACK_SIGNAL, signal.SIG_IGN)\npublish()\n",
        "publish()\nwithdraw_stack(STACK_SIGNAL)\nsignal.signal(STACK_SIGNAL, show)\n",
        "publish()\nsignal.signal(STACK_SIGNAL + 1, show)\npublish()\n",
        "signal.signal(STACK_SIGNAL + 1, show)\npublish()\n",
        "publish()\nwithdraw_stack(STACK_SIGNAL + 1)\nassert not signal.getsignal(STACK_SIGNAL + 1)\n",
        "publish(None)\n",
    ],
    ids=["between", "ignored", "withdrawn", "second between", "second", "second withdrawn", "off"],
)
def test_stack_signal_that_the_program_uses_is_left_to_it(start, body):
    child = start(body + "show('ready')\nshow(sys.stdin.readline())\n")
    assert StackFile.of(child.pid) is None
    assert read_stacks([child.pid]) == {}
    assert child.communicate("done\n")[0] == "done\n\n"


@pytest.mark.parametrize(
    "body",
    [
        "publish()\nfor at in (0, 1):\n    signal.signal(STACK_SIGNAL + at, signal.SIG_DFL)\n",
        "publish()\nif os.fork():\n    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n",
        "publish()\nos.execv(sys.executable, ['python', '-c', 'print(\"ready\"); input()'])\n",
    ],
    ids=["no handler", "forked", "another program"],
)
def test_stack_signal_goes_to_no_process_that_it_would_end(start, body):
    child = start(body + "show('ready')\nsys.stdin.readline()\n")
    family = [child.pid, *map(int, _children_of(child.pid))]
    assert all(StackFile.of(pid) is None for pid in family[1:])
    if len(family) == 1:
        assert read_stacks(family) == {}
    assert (child.communicate("done\n")[0], child.returncode) == ("", 0)


def _children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_stack_file_that_grew_large_is_emptied_and_places_of_ranks_are_named(start):
    child = start(BUSY.format("time.sleep(600)"))
    file = StackFile.of(child.pid)
    assert file is not None
    assert file._replace(path="") == ("", STACK_SIGNAL, child.pid, child.pid, 3, 8, os.getpid(), "4711")
    os.truncate(file.path, 2 << 20)
    assert functions_of(child, until="busy") == ["busy", "<module>"]
    assert os.stat(file.path).st_size < 1 << 20
    assert places_text(os.getpid()) == " (rank 3: <string>:12 in busy)"
    assert places_text(os.getpid(), [2]) == ""


def test_stack_place_is_the_innermost_line_of_the_program():
    own, step = Frame("/home/me/train.py", 41, "step"), Frame("/home/me/train.py", 90, "<module>")
    installed = Frame("/v/lib/python3/site-packages/x.py", 3, "f")
    deep = (Frame(subprocess.__file__, 9, "wait"), installed, own, step)
    assert str(Stack(deep)) == "it is at /home/me/train.py:41 in step"
    assert Stack(deep[:2]).place == "/v/lib/python3/site-packages/x.py:3 in f"
    assert Stack(deep[:1]).place.endswith("subprocess.py:9 in wait")


def test_stack_shows_other_letters_than_those_of_ascii(tmp_path):
    program, place = "def zählen_Ж():\n    write(all_threads=False)\nzählen_Ж()", f"{tmp_path}/ü€𝛼.py"
    with open(tmp_path / "stack", "w+") as file:
        exec(compile(program, place, "exec"), {"write": partial(faulthandler.dump_traceback, file)})
        file.seek(0)
        assert f"{place}:2 in zählen_Ж" in [str(frame) for frame in Stack.of_text(file.read()).frames]


def test_stack_leaves_out_frames_of_another_installation(tmp_path):
    inner, own = tmp_path / "mpidist/strategy.py", tmp_path / "mpidist/project/train.py"
    text = f'  File "{inner}", line 7 in reduce\n  File "{own}", line 3 in step\n'
    assert not Stack.of_text(text).is_inside  # the folder of a program may have the name
    (tmp_path / "else/mpidist/transport").mkdir(parents=True)
    (tmp_path / "else/mpidist/transport/tracebacks.py").touch()
    text = text.replace(str(inner), str(tmp_path / "else/mpidist/strategy.py"))
    assert str(Stack.of_text(text)) == f"it is inside mpidist, called at {own}:3 in step"


def test_stacks_of_ranks_at_one_place_are_put_together():
    step, read = Frame("train.py", 41, "step"), Frame("data.py", 12, "read")
    inner = Frame("/v/lib/python3/site-packages/x.py", 3, "f")
    stacks = {rank: Stack((step,)) for rank in range(8)} | {1: Stack((read, step)), 2: Stack((inner, step))}
    assert [(ranks, stack.place) for ranks, stack in together(stacks)] == [
        ("ranks 0, 2-7", "train.py:41 in step"),
        ("rank 1", "data.py:12 in read"),
    ]
    assert [ranks for ranks, _ in together(stacks, whole=True)] == ["ranks 0, 3-7", "rank 1", "rank 2"]


def test_stack_that_is_being_written_is_read_when_it_is_whole(tmp_path, monkeypatch):
    """The signal is neither pending nor blocked when a reader looks: then its handler begins to write."""
    file, read_status, head = tmp_path / "stack", stacks._fields, "Current thread (most recent call first):\n"
    file.touch()
    written = iter([head, f'{head}  File "train.py", line 3 in busy\n'])

    def fields(path):
        blocked = 1 << (STACK_SIGNAL - 1) if 0 < file.stat().st_size == len(head) else 0
        file.write_text(next(written, file.read_text()))
        return {**read_status(path), "SigBlk": f"{blocked:x}"}

    monkeypatch.setattr(stacks, "_fields", fields)
    one = StackFile(str(file), STACK_SIGNAL, os.getpid(), threading.get_native_id(), 0, 1, 0, "job")
    assert [one.answer(0), one.answer(0)] == [None, None]
    assert str(one.answer(0)) == "it is at train.py:3 in busy"
