"""The GPU check without a GPU: what it says, how it ends parts that hang, and every measurement on the stand-in."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mpi_session import clean_environment
from standin.gpus import looked_after
from standin.measuring import add_measuring
from standin.nccl import StandIn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_check  # noqa: E402
from gpu import programs, running  # noqa: E402
from gpu.environment import Environment, fits, unpack  # noqa: E402
from gpu.measuring import Bench, Sample  # noqa: E402
from gpu.parts import PARTS, Part  # noqa: E402
from gpu.report import Report, Row, read_report, table  # noqa: E402

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# What a part may do instead of measuring.
BEGINNING = """
import os, subprocess, sys, time
from pathlib import Path
from gpu.report import Report
report = Report(Path(sys.argv[sys.argv.index("--out") + 1]))
"""
PROGRAMS = {
    "answers": "report.add('is it there', 'yes', True)",
    "hangs": """
report.add("is it there", "yes", True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path("child").write_text(str(child.pid))
time.sleep(600)
""",
    "ignores_signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "crashes": """
report.add("is it there", "yes", True)
print("about to crash", flush=True)
os.abort()
""",
    "fails": "raise RuntimeError('no luck')",
    "says_nothing": "",
    "finds_no_gpu": "sys.exit(3)",
    "answers_in_part": """
with report.question("is it there"):
    raise RuntimeError("no luck")
report.add("is it fast", "no", False)
sys.exit(1)
""",
}
REST = "the rest of this part"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Let modules of `PROGRAMS` be parts, and be patient with none of them."""
    monkeypatch.setattr(running, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(running, "GRACE", 1.0)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(BEGINNING + text)
    path = os.pathsep.join([str(tmp_path), str(BENCHMARKS), str(BENCHMARKS.parent)])
    return Environment({**clean_environment(), "PYTHONPATH": path}, (), "there is no mpiexec")


@pytest.fixture
def outside_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs that are started not take themselves for a rank of these tests."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    path = [str(BENCHMARKS.parent), str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def run(name: str, environment: Environment, folder: Path, limit: float = 30) -> running.Outcome:
    return running.run(Part(name, (name,), "is it there", limit), 100, environment, folder)


def said_of(outcome: running.Outcome) -> dict[str, tuple[str, str]]:
    return {row.question: (row.got, row.note) for row in outcome.rows}


@pytest.mark.no_mpi
def test_part_that_hangs_is_ended_with_all_it_started_and_its_answers_stay(
    environment: Environment, tmp_path: Path
) -> None:
    outcome = run("hangs", environment, tmp_path, 4)
    assert outcome.why == "not done within 4 s"
    assert said_of(outcome) == {"is it there": ("yes", ""), REST: ("not measured", "not done within 4 s")}
    assert 4 <= outcome.seconds < 20
    pid = int((tmp_path / "child").read_text())
    assert not _is_running(pid)


@pytest.mark.no_mpi
def test_part_that_ignores_signals_is_killed(environment: Environment, tmp_path: Path) -> None:
    outcome = run("ignores_signals", environment, tmp_path, 4)
    assert outcome.why == "not done within 4 s"
    assert 5 <= outcome.seconds < 20


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("name", "why", "answers"),
    [
        ("crashes", "ended by SIGABRT: about to crash", {"is it there": "yes", REST: "not measured"}),
        ("fails", "ended with code 1: RuntimeError: no luck", {"is it there": "not measured"}),
        ("says_nothing", "", {"is it there": "not measured"}),
        ("finds_no_gpu", "no GPU: it said nothing", {"is it there": "not measured"}),
    ],
)
def test_part_that_ends_badly_says_why(
    environment: Environment, tmp_path: Path, name: str, why: str, answers: dict[str, str]
) -> None:
    outcome = run(name, environment, tmp_path)
    assert outcome.why == why
    assert {row.question: row.got for row in outcome.rows} == answers
    assert outcome.rows[-1].note == (why or "it ended without an answer")


@pytest.mark.no_mpi
def test_question_that_fails_does_not_stop_the_next(environment: Environment, tmp_path: Path) -> None:
    outcome = run("answers_in_part", environment, tmp_path)
    assert outcome.why == "some questions have no answer"
    assert said_of(outcome) == {"is it there": ("not measured", "RuntimeError: no luck"), "is it fast": ("no", "")}


@pytest.mark.no_mpi
def test_part_is_not_started_without_time_or_mpi(environment: Environment, tmp_path: Path) -> None:
    part = Part("answers", ("answers",), "is it there", 30)
    late = running.run(part, 0.9, environment, tmp_path)
    assert said_of(late) == {"is it there": ("not measured", "no time was left")}
    two = running.run(Part("answers", ("answers",), "is it there", 30, ranks=2), 100, environment, tmp_path)
    assert said_of(two)["is it there"] == ("not measured", "needs MPI: there is no mpiexec")


@pytest.mark.no_mpi
def test_check_goes_on_and_writes_after_each_part(environment: Environment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    parts = [Part(name, (name,), "is it there", 30, alone=name != "fails") for name in ("crashes", "answers")]
    parts.append(Part("fails", ("fails",), "is it good", 30, alone=False))
    check = gpu_check.Check(parts, out, 60)
    check.run(environment, tmp_path)
    assert list(check.outcomes) == ["crashes", "answers", "fails"]
    assert not check.is_all_right
    files = sorted(path.name for path in out.iterdir())
    assert files == ["gpu_check.json", "gpu_check.log", "gpu_check.md"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in files)
    written = json.loads((out / "gpu_check.json").read_text())
    assert [its["name"] for its in written["parts"]] == ["crashes", "answers", "fails"]
    text = (out / "gpu_check.md").read_text()
    assert "* crashes: ended by SIGABRT: about to crash" in text
    assert "| fails | is it good | not measured |  | ended with code 1: RuntimeError: no luck |" in text
    assert "about to crash" in (out / "gpu_check.log").read_text()


@pytest.mark.no_mpi
def test_parts_that_measure_leave_time_to_the_others(environment: Environment, tmp_path: Path) -> None:
    parts = [Part("hangs", ("hangs",), "", 60), Part("answers", ("answers",), "is it there", 30, alone=False)]
    check = gpu_check.Check(parts, tmp_path, 10)
    check.run(environment, tmp_path)
    assert check.outcomes["hangs"].why == "not done within 6 s"
    assert check.outcomes["answers"].why == ""


@pytest.mark.no_mpi
def test_check_is_content_only_if_all_was_measured_and_is_right(environment: Environment, tmp_path: Path) -> None:
    check = gpu_check.Check([Part("answers", ("answers",), "is it there", 30)], tmp_path, 60)
    assert not check.is_all_right
    check.run(environment, tmp_path)
    assert check.is_all_right


@pytest.mark.no_mpi
def test_without_a_gpu_the_command_says_so_and_leaves_every_question(tmp_path: Path) -> None:
    program = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path), "--wheels", str(tmp_path)]
    hidden = {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, env=hidden, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "nothing can be checked here: CuPy" in done.stdout
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    rows = [row for part in written["parts"] for row in part["rows"]]
    assert [row["question"] for row in rows] == [part.question for part in PARTS]
    assert all(row["got"] == "not measured" and row["note"].startswith("no GPU: CuPy") for row in rows)
    text = (tmp_path / "gpu_check.md").read_text()
    assert f"0 wrong, {len(PARTS)} not measured" in text
    assert os.uname().nodename not in text
    assert str(BENCHMARKS.parent) not in text


STAND_IN = """
import os
if "GPU_CHECK_RANKS" in os.environ or os.environ.get("ON_STAND_IN") == "1":
    from mpidist.transport import cuda

    worlds = []

    def current():
        if not worlds:
            from mpi4py import MPI
            from standin.nccl import StandIn
            from standin.measuring import add_measuring

            worlds.append(StandIn(MPI.COMM_WORLD))
            add_measuring(worlds[0])
        return worlds[0].cuda

    cuda.current = current
"""


@pytest.mark.long
@pytest.mark.no_mpi
@pytest.mark.timeout(120)
def test_the_whole_command_on_the_stand_in(tmp_path: Path) -> None:
    """Every part that measures, in processes and jobs as on a GPU; what only a GPU can do is left out."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    left_out = [part.name for part in PARTS if part.command[0] == "gpu.programs"]
    program = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--tiny", "--skip", ",".join(left_out)]
    path = os.pathsep.join([str(tmp_path / "site"), str(BENCHMARKS.parent), str(BENCHMARKS.parent / "tests")])
    variables = {**clean_environment(), "PYTHONPATH": path, "ON_STAND_IN": "1"}
    out = tmp_path / "out"
    done = subprocess.run(
        [*program, "--out", str(out), "--wheels", str(tmp_path)],
        env=variables, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr  # torch sees no GPU, or is not there
    written = json.loads((out / "gpu_check.json").read_text())
    assert {part["name"]: part["why"] for part in written["parts"]} == dict.fromkeys(
        [part.name for part in PARTS if part.name not in left_out], ""
    ), (out / "gpu_check.log").read_text()
    rows = [row for part in written["parts"] for row in part["rows"]]
    assert [row for row in rows if row["got"] == "not measured" and "torch" not in row["note"]] == []
    assert "* GPU: Stand-in" in (out / "gpu_check.md").read_text()


@pytest.mark.no_mpi
def test_parts_are_programs_with_questions_of_their_own() -> None:
    assert len({part.name for part in PARTS}) == len({part.question for part in PARTS}) == len(PARTS)
    assert all(importlib.util.find_spec(part.command[0]) for part in PARTS)


@pytest.mark.no_mpi
def test_parts_are_chosen_by_name() -> None:
    assert [part.name for part in gpu_check.choose("overlap,pack", "")] == ["pack", "overlap"]
    assert len(gpu_check.choose("", "pack")) == len(PARTS) - 1
    with pytest.raises(SystemExit, match="no such part: sprint; there are facts, "):
        gpu_check.choose("sprint", "")


@pytest.mark.no_mpi
def test_table_of_recorded_rows() -> None:
    rows = {
        "pack": [Row("pack", "89 % | 47 us"), Row("unpack", "not measured", None, "no time was left")],
        "tests": [Row("1 rank", "9 passed", True), Row("2 ranks", "1 failed", False, "slow\nvery")],
    }
    lines = table({"GPU": "one"}, rows, ["Parts: none."]).splitlines()
    assert "* GPU: one" in lines
    assert "4 answers: 1 wrong, 1 not measured." in lines
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| pack | pack | 89 % \\| 47 us |  |  |",
        "| pack | unpack | not measured |  | no time was left |",
        "| tests | 1 rank | 9 passed | yes |  |",
        "| tests | 2 ranks | 1 failed | **no** | slow very |",
    ]


@pytest.mark.no_mpi
def test_report_that_was_cut_off_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    report = Report(path)
    report.fact("GPU", "one")
    report.add("is it there", "yes", True, us=3.5)
    facts, (row,) = read_report(path)
    assert facts == {"GPU": "one"}
    assert (row.got, row.numbers) == ("yes", {"us": 3.5})
    path.write_text(path.read_text()[:20])
    assert read_report(path) == ({}, [])
    assert read_report(tmp_path / "nowhere.json") == ({}, [])


@pytest.mark.no_mpi
def test_long_logs_are_cut_in_the_middle() -> None:
    text = running.log_text("a" * 5000 + "b" * 50_000)
    assert len(text) < running.HEAD + running.TAIL + 100
    assert "43000 characters left out" in text
    assert running.log_text("short") == "short"


@pytest.mark.no_mpi
def test_wheel_is_unpacked_where_programs_find_their_libraries(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        program = zipfile.ZipInfo("some-1.0.data/data/bin/mpiexec")
        program.external_attr = 0o755 << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr("some-1.0.data/data/lib/libmpi.so.12", "library")
        archive.writestr("some-1.0.data/purelib/other.py", "")
        archive.writestr("some/__init__.py", "")
        archive.writestr("../outside.py", "")
    unpack(wheel, tmp_path / "site")
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"bin/mpiexec", "lib/libmpi.so.12", "other.py", "some/__init__.py"}
    assert os.access(tmp_path / "site" / "bin" / "mpiexec", os.X_OK)
    assert not (tmp_path / "outside.py").exists()


@pytest.mark.no_mpi
def test_wheels_of_other_pythons_are_left_alone() -> None:
    mine = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert fits("mpich-5.0.2-py3-none-manylinux_2_28_x86_64.whl")
    assert fits("pytest_mpi-0.6-py2.py3-none-any.whl")
    assert fits(f"mpi4py-4.1.2-{mine}-{mine}-manylinux1_x86_64.manylinux_2_5_x86_64.whl")
    assert not fits("mpi4py-4.1.2-cp39-cp39-manylinux1_x86_64.manylinux_2_5_x86_64.whl")


@pytest.mark.no_mpi
def test_summary_of_the_tests_is_read() -> None:
    said = """
SKIPPED [3] tests/test_nccl.py:70: needs a GPU for each rank
SKIPPED [1] tests/test_nccl.py:80: needs 2 GPUs
FAILED tests/test_nccl.py::test_one[GPU] - AssertionError
ERROR tests/test_nccl.py::test_two[GPU] - OSError
1 failed, 40 passed, 4 skipped, 100 deselected, 1 error in 12.3s
"""
    assert programs.counts_of(said) == {"passed": 40, "failed": 2, "skipped": 4}
    notes = programs.notes_of(said)
    assert notes.startswith("failed: tests/test_nccl.py::test_one[GPU], tests/test_nccl.py::test_two[GPU]; skipped: ")
    assert programs.counts_of("nothing of the kind") == {"passed": 0, "failed": 0, "skipped": 0}
    found = {Path(name).stem for name in programs.files_with_gpu_tests()}
    names = {"chunks", "edges"}  # of tests of the stand-in alone
    assert found >= {"test_nccl", "test_host_staging", "test_device_overlap", "test_device_compression"}
    assert not found & {f"test_device_{name}" for name in names}


@pytest.mark.no_mpi
@pytest.mark.usefixtures("outside_mpi")
@pytest.mark.parametrize(
    ("body", "got", "is_right"),
    [
        ("assert 1 + 1 == 3", "0 passed, 1 failed, 0 skipped", False),
        ("assert 1 + 1 == 2", "1 passed, 0 failed, 0 skipped", True),
        ("pytest.skip('needs a GPU')", "not measured", None),
        ("import time; time.sleep(60)", "0 passed, 0 failed, 0 skipped", False),
    ],
)
def test_tests_that_need_a_gpu_are_counted(tmp_path: Path, body: str, got: str, is_right: bool | None) -> None:
    report, path = Report(None), tmp_path / "test_it.py"
    path.write_text(f"import pytest\n@pytest.mark.gpu\ndef test_it():\n    {body}\n")
    limit = 6 if "sleep" in body else 40  # the others are not about time, and the machine may be busy
    programs.run_tests(report, "1 rank", "1", [str(path), "-p", "mpi_session.plugin"], limit)
    (row,) = report.rows
    assert (row.got, row.is_right) == (got, is_right), row
    assert "sleep" not in body or "not done within 6 s" in row.note


@pytest.mark.no_mpi
@pytest.mark.usefixtures("outside_mpi")
def test_tests_that_cannot_be_run_are_no_success() -> None:
    report = Report(None)
    programs.run_tests(report, "1 rank", "1", ["tests/test_nowhere.py"], 40)
    (row,) = report.rows
    assert row.is_right is False
    assert row.note.startswith("pytest's exit code 4")


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("code", "said", "got", "is_right"),
    [
        (0, "9 launches, right numbers\n========= ERROR SUMMARY: 0 errors", "0 errors", True),
        (99, "right numbers\n========= ERROR SUMMARY: 3 errors", "3 errors", False),
        (0, "right numbers\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
         "0 hazards displayed (0 errors, 0 warnings)", True),
        (1, "ArithmeticError\n========= ERROR SUMMARY: 0 errors", "0 errors", False),
        (1, "right numbers\n========= ERROR SUMMARY: 0 errors", "0 errors", False),
        (3, "nothing can be measured here", "not measured", None),
        (1, "Device not supported", "not measured", None),
    ],
)  # fmt: skip
def test_what_the_sanitizer_says_is_read(code: int, said: str, got: str, is_right: bool | None) -> None:
    assert programs.verdict(code, said)[:2] == (got, is_right)


@pytest.mark.no_mpi
@pytest.mark.usefixtures("outside_mpi")
@pytest.mark.parametrize(("errors", "is_right"), [(0, True), (2, False)])
def test_sanitizer_is_given_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int, is_right: bool
) -> None:
    """By a program of its name that runs what it is given, on the stand-in."""
    program, summary = tmp_path / "compute-sanitizer", f"========= ERROR SUMMARY: {errors} errors"
    program.write_text(f'#!/bin/sh\nshift 4\n"$@" || exit 1\necho "{summary}"\nexit {99 if errors else 0}\n')
    program.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("ON_STAND_IN", "1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    report = Report(None)
    programs.check_sanitizer(report, "memcheck", 40)
    (row,) = report.rows
    assert (row.got, row.is_right, row.note) == (f"{errors} errors", is_right, ""), row


@pytest.mark.no_mpi
def test_sanitizer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    report = Report(None)
    programs.check_sanitizer(report, "memcheck", 40)
    assert report.rows[0].note.startswith("RuntimeError: compute-sanitizer is not on PATH")


@pytest.mark.no_mpi
@pytest.mark.usefixtures("outside_mpi")
def test_digits_are_learnt_on_the_cpu_and_a_failure_is_told() -> None:
    assert programs.accuracy(1, "cpu", 3, 50) > 0.5
    with pytest.raises(RuntimeError, match=r"exit code [1-9]"):
        programs.accuracy(1, "cpu", -1, 50)


# Every measurement, small, on the stand-in.


@pytest.fixture
def standin(comm: Intracomm) -> Iterator[StandIn]:
    made = StandIn(comm)
    add_measuring(made)
    with looked_after(made, comm) as world:
        yield world


def measured(world: StandIn, module: str, path: Path | None = None) -> Report:
    """Run a part's measurements."""
    report = Report(path)
    importlib.import_module(f"gpu.{module}").measure(Bench(world.cuda, True), report)
    return report


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize(
    ("module", "answers"),
    [("facts", 8), ("pack", 11), ("small_kernels", 1)],
)
def test_measurement_on_the_stand_in(
    standin: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str], module: str, answers: int
) -> None:
    report = measured(standin, module, tmp_path / "part.json")
    assert report.num_failed == 0, [row.note for row in report.rows]
    others = [row for row in report.rows if "torch" not in row.question]
    assert len(others) == answers, [row.question for row in others]
    assert read_report(tmp_path / "part.json")[1] == report.rows
    said = capfd.readouterr().out
    assert all(row.got in said for row in report.rows)
    assert not any(row.got == "not measured" for row in others)


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(("module", "answers"), [("staged_all_reduce", 2), ("overlap", 1)])
def test_measurement_of_two_ranks_on_the_stand_in(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch, module: str, answers: int
) -> None:
    for name in ("MPIDIST_NCCL", "MPIDIST_PRETEND_NODES", "MPIDIST_STAGING_BYTES"):
        monkeypatch.setenv(name, "")  # and back, after the measurement has set it
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_CHECK_RANKS", "2")
    monkeypatch.setenv("MPIDIST_NCCL", "0")
    report = measured(standin, module)
    assert len(report.rows) == answers
    # What hides behind what is chance here: there may be nothing to hide.
    assert [row.note for row in report.rows if row.got == "not measured" and "nothing to hide" not in row.note] == []


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("what", ["nothing", "one byte", "too late"])
def test_wrong_results_are_not_timed(standin: StandIn, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    from gpu import pack

    class Wrong(pack.DeviceKernels):  # type: ignore[misc]
        def pack(self, sources: Any, buffer: Any, overflow: Any = None) -> None:
            if what != "nothing":
                super().pack(sources, buffer)
            if what == "one byte":
                buffer.view(np.uint8)[7:8] = 1
            if what == "too late":
                buffer[-1:] = sources[0].reshape(-1)[:1]

    monkeypatch.setattr(pack, "DeviceKernels", Wrong)
    report = measured(standin, "pack")
    packed = [row for row in report.rows if "host's time" not in row.question and "torch" not in row.question]
    assert len(packed) == 4
    assert all(row.got == "not measured" and "bytes are wrong" in row.note for row in packed), packed


@pytest.mark.no_mpi
def test_sample_gives_medians_and_ends() -> None:
    sample = Sample(tuple(number * 1e-6 for number in range(101)))
    assert str(sample) == "50 us (5 us to 95 us)"
    assert str(Sample((0.0123,) * 3)) == "12.3 ms (12.3 ms to 12.3 ms)"


@pytest.mark.no_mpi
def test_packs_are_filled_from_the_last_gradient() -> None:
    from gpu.overlap import packs_of

    arrays = [np.zeros(size, np.uint8) for size in (5, 4, 2, 9, 3, 1)]
    packs = packs_of(arrays, 4)
    assert [[its.size for its in pack] for pack in packs] == [[1, 3], [9], [2, 4], [5]]
