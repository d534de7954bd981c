"""The run at several numbers of ranks itself: what it shows of suites that fail in all ways."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import mpi_session
import pytest
from mpi_session import clean_environment
from mpi_session.selection import plan, teams_of

pytestmark = [pytest.mark.no_mpi, pytest.mark.long]

PLUGINS = "mpi_session.plugin", "no:cacheprovider", "no:zarr", "no:hypothesispytest"
OPTIONS = [*(f"-p{name}" for name in PLUGINS), "--mpi-grace", "600"]


def command(*arguments):
    return [sys.executable, "-m", "pytest", *OPTIONS, *arguments]


def environment(**variables):
    names = ("CI", "TEST_CI", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    clean = {name: value for name, value in clean_environment().items() if name not in names}
    return {**clean, "PYTHONPATH": str(Path(mpi_session.__file__).parents[1]), "COLUMNS": "200", **variables}


def write(folder, source):
    (folder / "pytest.ini").write_text(
        "[pytest]\ntimeout = 600\naddopts = --strict-markers\nmpi_accepted_skips = 'needs a GPU'\n"
    )
    (folder / "test_it.py").write_text("import os, signal, pytest\nfrom mpi4py import MPI\n" + source)
    return folder


class Result:
    def __init__(self, folder, *arguments, **variables):
        done = subprocess.run(
            command(*arguments), cwd=folder, env=environment(**variables), capture_output=True, text=True, check=False
        )
        self.status, self.text = done.returncode, done.stdout + done.stderr

    def section(self, title):
        """Return what is shown below a heading of the failures or errors."""
        heading = rf"^_+ {re.escape(title)} _+$"
        match = re.search(rf"{heading}(.*?)(?=^(_{{4,}} .* _+|=+ .* =+)$)", self.text, re.M | re.S)
        assert match, f"no section {title!r} in\n{self.text}"
        return match[1]

    def closing(self):
        return self.text.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A suite without deaths, at 1 and 3 ranks."""
    source = """
def test_passes(comm):
    assert comm.allreduce(1) == comm.size
def test_fails_on_one(comm):
    print("printed by", comm.rank)
    left = comm.rank
    assert left != 2, "rank two is unhappy"
def test_fails_everywhere_at_3(comm):
    assert comm.size == 1
def test_skips_on_one(comm):
    if comm.rank == 1:
        pytest.skip("odd rank")
def test_skips():
    pytest.skip("for a reason")
@pytest.mark.xfail(strict=True)
def test_expected_on_one(comm):
    assert comm.rank != comm.size - 1
@pytest.fixture
def broken(comm):
    assert comm.rank != 1, "broken on one"
def test_setup(broken, comm):
    comm.Barrier()
@pytest.mark.ranks(min=2)
def test_two_or_more(): pass
@pytest.mark.ranks(1, 2)
def test_one_or_two(): pass
@pytest.mark.ranks(5)
def test_five(): pass
@pytest.mark.no_mpi
def test_once(): pass
@pytest.mark.mpi(min_size=2)
def test_of_pytest_mpi(): pass
"""
    return Result(write(tmp_path_factory.mktemp("quiet"), source), "--ranks", "1,3", "-v", "-ra")


def test_failures_of_some_ranks_are_the_tests_with_traceback_and_output(quiet):
    assert re.search(r"^mpi: .+ at 1, 3 ranks$", quiet.text, re.M)
    assert "test_it.py::test_fails_on_one [1 rank] PASSED" in quiet.text
    shown = quiet.section("test_fails_on_one [3 ranks]")
    assert re.search(r"^\[rank 2\]$", shown, re.M)
    assert "E       AssertionError: rank two is unhappy" in shown
    assert re.search(r"-+ Captured stdout call \[rank 2\] -+\nprinted by 2$", shown, re.M)
    assert "printed by 0" not in shown
    assert "FAILED test_it.py::test_fails_on_one [3 ranks] - [rank 2] AssertionError: rank two" in quiet.text
    shown = quiet.section("test_fails_everywhere_at_3 [3 ranks]")
    assert "[ranks 0, 1, 2]" in shown
    assert shown.count("assert comm.size == 1") == 1
    assert "test_it.py::test_setup [3 ranks] ERROR" in quiet.text
    assert "broken on one" in quiet.section("ERROR at setup of test_setup [3 ranks]")
    shown = quiet.section("test_skips_on_one [3 ranks]")
    assert "[rank 1] with the reason 'odd rank', but not [ranks 0, 2]" in shown
    assert "test_it.py::test_expected_on_one [3 ranks] XFAIL" in quiet.text


def test_marks_choose_the_rank_counts(quiet):
    ran = dict.fromkeys(re.findall(r"test_it.py::(\w+ \[.*\]) PASSED", quiet.text))
    expected = ("passes [1 rank]", "passes [3 ranks]", "two_or_more [3 ranks]", "one_or_two [1 rank]", "once [no MPI]")
    absent = ("two_or_more [1 rank]", "one_or_two [3 ranks]", "once [3 ranks]", "five [3 ranks]")
    assert {f"test_{test}" for test in expected} | {"test_of_pytest_mpi [3 ranks]"} <= ran.keys()
    assert not {f"test_{test}" for test in absent} & ran.keys()


def test_one_closing_line_and_exit_status(quiet):
    assert quiet.status == 1
    counts = "3 failed, 10 passed, 3 skipped, 1 deselected, 2 xfailed, 1 error"
    assert re.fullmatch(rf"=+ {counts} in [\d.]+s.* =+", quiet.closing())
    assert len(re.findall(r" in [\d.]+s.* =+$", quiet.text, re.M)) == 1
    assert "SKIPPED [2] test_it.py" in quiet.text
    assert "[100%]" in quiet.text


@pytest.fixture(scope="module")
def deadly(tmp_path_factory):
    """A suite in which ranks hang and die."""
    source = """
def test_first(): pass
def test_leaves_others_waiting(comm):
    print("last words of", comm.rank)
    if comm.rank == 1:
        raise ValueError("bad luck")
    comm.Barrier()
@pytest.mark.timeout(10)
def test_stuck(comm):
    if comm.rank == 0:
        wait_for_a_message(comm)
    comm.Barrier()
def wait_for_a_message(comm):
    comm.recv(source=1)
def test_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()
def test_last_of_four_launches(comm):
    comm.Barrier()
def test_exits(comm):
    if comm.rank == 0:
        os._exit(3)
    comm.Barrier()
def test_too_late(comm): pass
"""
    return Result(write(tmp_path_factory.mktemp("deadly"), source), "--ranks", "2", "-v", "--mpi-grace", "1")


def test_rank_that_failed_while_others_wait_ends_with_all_stacks(deadly):
    shown = deadly.section("test_leaves_others_waiting [2 ranks]")
    assert "ValueError: bad luck" in shown
    assert "last words of 1" in shown
    assert "failed on [rank 1], and after 1 s not all of [rank 0]" in shown
    assert re.search(r"^\[rank 0\] was at .*\n  File .*test_it.py\", line \d+ in test_leaves", shown, re.M)
    assert re.search(r"^\[rank 1\] was at .*\n  outside of the test", shown, re.M)


def test_stuck_test_ends_within_its_limit_with_all_stacks(deadly):
    shown = deadly.section("test_stuck [2 ranks]")
    assert "time limit of 10 s" in shown
    frame = r'  File ".*test_it.py", line \d+ in '
    assert re.search(rf"^\[rank 0\] .*\n{frame}wait_for_a_message\n{frame}test_stuck$", shown, re.M)
    assert re.search(rf"^\[rank 1\] .*\n{frame}test_stuck$", shown, re.M)


def test_death_of_a_rank_is_the_tests_failure_and_the_rest_is_run_in_at_most_three_more_launches(deadly):
    assert "[rank 1] ended with SIGKILL" in deadly.section("test_killed [2 ranks]")
    assert "[rank 0] ended with exit status 3" in deadly.section("test_exits [2 ranks]")
    assert "test_first [2 ranks] PASSED" in deadly.text
    assert "test_last_of_four_launches [2 ranks] PASSED" in deadly.text
    assert deadly.text.count(" again, with the ") == 3
    assert "Not run at 2 ranks: 4 launches have ended early" in deadly.section("test_too_late [2 ranks]")
    assert re.fullmatch(r"=+ 5 failed, 2 passed in [\d.]+s.* =+", deadly.closing())
    assert deadly.status == 1


def test_differing_collection_is_an_error(tmp_path):
    source = "@pytest.mark.parametrize('x', range(1 + MPI.COMM_WORLD.rank))\ndef test_x(x): pass\n"
    result = Result(write(tmp_path, source), "--ranks", "2")
    assert "test_it.py::test_x[1]: only [rank 1]" in result.section(
        "ERROR collecting the same tests on all ranks [2 ranks]"
    )
    assert result.status == pytest.ExitCode.INTERRUPTED


def test_module_that_fails_on_one_rank_is_an_error(tmp_path):
    source = "if MPI.COMM_WORLD.rank == 1:\n    raise RuntimeError('no import here')\ndef test_x(): pass\n"
    result = Result(write(tmp_path, source), "--ranks", "2")
    shown = result.section("ERROR collecting test_it.py [2 ranks]")
    assert "[rank 1] only" in shown
    assert "RuntimeError: no import here" in shown
    assert "1 error in" in result.closing()


def test_in_ci_a_skip_is_a_failure_but_for_a_missing_gpu(tmp_path):
    source = """
def test_gpu(): pytest.skip("needs a GPU with NVLink")
def test_else(): pytest.skip("needs NVLink, or needs a GPU")
"""
    result = Result(write(tmp_path, source), "--ranks", "2", "-rs", CI="true")
    assert "skipped in CI: 'needs NVLink, or needs a GPU'" in result.section("test_else [2 ranks]")
    assert "1 failed, 1 skipped" in result.closing()
    assert "SKIPPED [1] test_it.py:4: needs a GPU with NVLink" in result.text
    module = write(tmp_path, "pytest.skip('a whole module', allow_module_level=True)\n")
    result = Result(module, "--ranks", "1", TEST_CI="1")
    assert "skipped in CI: 'a whole module'" in result.section("ERROR collecting test_it.py [1 rank]")
    assert result.status == 1


def test_selection_and_usage_errors(tmp_path):
    write(tmp_path, "@pytest.mark.parametrize('x', 'ab')\ndef test_x(x): pass\ndef test_y(): assert False\n")
    one = Result(tmp_path, "--ranks", "2", "test_it.py::test_x[b] [2 ranks]", "-v")
    assert one.text.count(" PASSED") == 1
    assert one.status == 0
    missing = Result(tmp_path, "--ranks", "2", "nowhere.py")
    assert missing.status == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: file or directory not found: nowhere.py" in missing.text
    assert "got '0'" in Result(tmp_path, "--ranks", "0").text


def test_outer_session_imports_no_mpi4py_and_stops_at_maxfail(tmp_path):
    write(tmp_path, "def test_a(): assert False\ndef test_b(): assert False\n")
    (tmp_path / "conftest.py").write_text(
        "import os, sys\n"
        "def pytest_terminal_summary(terminalreporter):\n"
        "    terminalreporter.line('outer has mpi4py: %s' % ('mpi4py' in sys.modules))\n"
    )
    result = Result(tmp_path, "--ranks", "1,2", "-x", "--junitxml", "all.xml")
    assert "outer has mpi4py: False" in result.text
    assert "stopping after 1 failures" in result.text
    assert "1 failed in" in result.closing()
    assert (tmp_path / "all.xml").read_text().count("<testcase") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_process(tmp_path, number):
    source = """
import subprocess, time
def test_sleeps(comm):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with open(f"pids{comm.rank}.part", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {child.pid}")
    os.rename(f"pids{comm.rank}.part", f"pids{comm.rank}")
    comm.recv()
"""
    write(tmp_path, source)
    files = [tmp_path / "pids0", tmp_path / "pids1"]
    run = command("--ranks", "2")
    with subprocess.Popen(run, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as outer:
        while not all(map(Path.exists, files)):
            time.sleep(0.05)
        outer.send_signal(number)
        text = outer.communicate()[0].decode()
    assert outer.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in text
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    while any(map(is_running, pids)):  # what was killed may take a moment; the test's limit ends a wait in vain
        time.sleep(0.05)


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_clean_environment_makes_no_rank(monkeypatch):
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "HYDI_CONTROL_FD", "MPI_SESSION_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPI4PY_MPIABI", "mpich")
    kept = clean_environment()
    assert not [name for name in kept if name.startswith(("PMI", "OMPI", "HYD", "MPI_"))]
    assert kept["MPI4PY_MPIABI"] == "mpich"
    assert kept["PATH"] == os.environ["PATH"]


class Item:
    """What the selection asks of a test."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def iter_markers(self, name):
        return (mark.mark for mark in self.marks if mark.name == name)


ITEMS = [
    *(Item(f"test_it.py::test_x[{case}]") for case in range(40)),
    *(Item(f"test_it.py::test_y[{case}]", pytest.mark.whole) for case in range(40)),
    Item("test_it.py::test_z"),
    *(Item(f"test_it.py::test_two[{case}]") for case in range(2)),
    Item("test_it.py::test_three", pytest.mark.ranks(3)),
    *(Item(f"test_it.py::test_named[{case}]", pytest.mark.ranks(2, 4)) for case in range(3)),
    *(Item(f"test_it.py::test_once[{case}]", pytest.mark.no_mpi) for case in range(40)),
    Item("test_it.py::test_long", pytest.mark.long),
]


def runs():
    """Return (test, case or nothing, team) of all runs at 1 to 4 ranks and in two lanes."""
    chosen = plan(ITEMS, teams_of([1, 2, 3, 4], 2))
    found = re.compile(r"test_it.py::(\w+)(?:\[(\d+)\])?")
    return [(*found.match(item.nodeid).groups(), team) for team, items in chosen.items() for item in items]


def test_selection_runs_each_case_at_one_number_of_ranks_and_whole_tests_at_all():
    assert Counter(test for test, _, _ in runs()) == {
        "test_x": 40, "test_y": 160, "test_z": 4, "test_two": 4, "test_three": 1, "test_named": 6, "test_once": 40,
        "test_long": 4,
    }  # fmt: skip
    assert {team for test, _, team in runs() if test == "test_three"} == {"3.0"}
    assert len({team for test, _, team in runs() if test == "test_once"}) == 1, "a module is in one lane"
    many = [(int(case), team) for test, case, team in runs() if test == "test_x"]
    assert sorted(case for case, _ in many) == list(range(40))
    assert Counter(team for _, team in many) == dict.fromkeys(["1.0", "2.0", "3.0", "4.0"], 10)
    few = [(case, team) for test, case, team in runs() if test == "test_two"]
    assert sorted(team for _, team in few) == ["1.0", "2.0", "3.0", "4.0"]
    assert Counter(case for case, _ in few) == {"0": 2, "1": 2}


def test_table_of_pairs_takes_the_place_of_all_products(tmp_path):
    product = "".join(f"@pytest.mark.parametrize('{name}', range(4))\n" for name in "abc")
    write(tmp_path, f"{product}def test_few(a, b, c): pass\n@pytest.mark.whole\n{product}def test_all(a, b, c): pass\n")
    result = Result(tmp_path, "--ranks", "1", "-v")
    assert 16 <= result.text.count("::test_few[") <= 24
    assert result.text.count("::test_all[") == 64


# Each waits for the other: one after the other they would wait for ever.
MEET = """
import time
def meet(own, other):
    open(own, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)
"""


def test_no_mpi_tests_run_beside_the_ranks(tmp_path):
    source = """
def test_ranks(comm):
    meet(f"rank{comm.rank}", "alone")
@pytest.mark.no_mpi
def test_alone():
    meet("alone", "rank1")
    assert not os.path.exists("rank2")
@pytest.mark.no_mpi
def test_fails():
    assert os.environ["PMI_SIZE" if "PMI_SIZE" in os.environ else "OMPI_COMM_WORLD_SIZE"] == "2"
"""
    result = Result(write(tmp_path, MEET + source), "--ranks", "2", "-v", "--times")
    assert "AssertionError" in result.section("test_fails [no MPI]")
    assert "test_ranks [2 ranks] PASSED" in result.text
    assert "1 failed, 2 passed" in result.closing()
    assert re.search(r"^test_it.py +\d+\.\d +\d+\.\d +\d+\.\d$", result.text, re.M), "of 2 ranks, no MPI, CPU"
    same = Result(tmp_path, "--ranks", "2", "--lanes", "0", "-k", "fails")
    assert "1 passed, 2 deselected" in same.closing(), "then all ranks have run it"


def test_failure_beside_the_ranks_ends_these_too_if_it_is_the_last_allowed(tmp_path):
    source = """
def test_ranks(comm):
    open("pid", "w").write(str(os.getpid()))
    meet("rank", "nothing")
@pytest.mark.no_mpi
def test_alone():
    meet("alone", "rank")
    assert False
"""
    result = Result(write(tmp_path, MEET + source), "--ranks", "1", "-x")
    assert "1 failed in" in result.closing(), "the ranks, which wait for nothing, would fail, too"
    while is_running((tmp_path / "pid").read_text()):
        time.sleep(0.05)
