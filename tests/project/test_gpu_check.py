"""The GPU check: what it says, and how it ends parts that hang."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from mpi_session import clean_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_check  # noqa: E402
from gpu import running  # noqa: E402
from gpu.report import WRONG, Report, Row, read_rows, table, text_of  # noqa: E402
from gpu.running import PARTS, ROOT, Environment, Part, prepare  # noqa: E402

# What a part may do instead of measuring.
BEGINNING = """
import os, signal, subprocess, sys, time
from pathlib import Path
def ask(bench, report):
"""
PROGRAMS = {
    "answers": "report.add('is it there', 'yes')",
    "hangs": """
report.add("is it there", "yes")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path("child").write_text(str(child.pid))
time.sleep(600)
""",
    "ignores_signals": "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
    "crashes": """
report.add("is it there", "yes")
print("about to crash", flush=True)
os.abort()
""",
    "fails": "raise RuntimeError('no luck')",
    "says_nothing": "pass",
    "answers_in_part": """
with report.question("is it there"):
    raise RuntimeError("no luck")
report.add("is it fast", "no")
""",
}
REST = "the rest of this part"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Let modules of `PROGRAMS` be parts, and be patient with none of them."""
    monkeypatch.setattr(running, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(running, "GRACE", 1.0)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(BEGINNING + textwrap.indent(text, "    "))
    path = os.pathsep.join([str(tmp_path), str(BENCHMARKS), str(BENCHMARKS.parent)])
    return Environment({**clean_environment(), "PYTHONPATH": path}, (), "there is no mpiexec")


@pytest.fixture
def outside_mpi(monkeypatch):
    """Let programs that are started not take themselves for a rank of these tests."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    path = [str(BENCHMARKS.parent), str(BENCHMARKS), *(str(BENCHMARKS.parent / name) for name in ("tests", "tools"))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def run(name, environment, folder, limit=600):
    return running.run(Part(name, f"{name}:ask", "is it there", limit), 600, environment, folder)


def said_of(outcome):
    return {row.question: (row.got, row.note) for row in outcome.rows}


def _has_ended(pid):
    """Wait for the end of what was killed. The test's limit ends a wait in vain."""
    with suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)
    return True


YES, LATE, NOT_MEASURED = ("yes", ""), "not done within 15 s", "not measured"


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("name", "why", "answers", "last"),
    [
        ("hangs", LATE, {"is it there": YES}, REST),
        ("ignores_signals", LATE, {}, "is it there"),
        ("crashes", "ended with code -6: ", {"is it there": YES}, REST),
        ("fails", "ended with code 1: RuntimeError: no luck", {}, "is it there"),
        ("says_nothing", "", {}, "is it there"),
        ("answers_in_part", "ended with code 1",
         {"is it there": (NOT_MEASURED, "RuntimeError: no luck"), "is it fast": ("no", "")}, REST),
    ],
)  # fmt: skip
def test_failed_part_gives_its_reason_and_keeps_its_answers(environment, tmp_path, name, why, answers, last):
    """With all that it started; a question that fails does not stop the next one."""
    outcome = run(name, environment, tmp_path, 15 if why == LATE else 600)
    assert outcome.why.startswith(why)
    note = outcome.why or "it ended without an answer"
    assert said_of(outcome) == {**answers, last: (NOT_MEASURED, note)}
    assert name != "crashes" or "about to crash" in outcome.log
    if why == LATE:
        assert outcome.seconds >= 15 + (name == "ignores_signals")
    assert name != "hangs" or _has_ended(int((tmp_path / "child").read_text()))


@pytest.mark.no_mpi
def test_part_is_not_started_without_time_or_mpi(environment, tmp_path):
    part = Part("answers", "answers:ask", "is it there", 600)
    late = running.run(part, 0.9, environment, tmp_path)
    assert said_of(late) == {"is it there": ("not measured", "no time was left")}
    two = running.run(Part("answers", "answers:ask", "is it there", 600, ranks=2), 600, environment, tmp_path)
    assert said_of(two)["is it there"] == ("not measured", "needs MPI: there is no mpiexec")
    tests = Part("tests", "tests", "are they right", 600, words=("1", "tests/test_nowhere.py"))
    started = running.run(tests, 600, environment, tmp_path)  # one process, which would start mpiexec
    assert said_of(started) == {"are they right": ("not measured", "needs MPI: there is no mpiexec")}


@pytest.mark.no_mpi
def test_check_goes_on_and_writes_after_each_part(environment, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    parts = [Part(name, f"{name}:ask", "is it there", 600, alone=name != "fails") for name in ("crashes", "answers")]
    parts.append(Part("fails", "fails:ask", "is it good", 600, alone=False))
    first = tmp_path / "first"
    first.mkdir()
    check = gpu_check.Check(parts[1:2], first, 600)
    assert not check.is_all_right, "nothing was measured"
    check.run(environment, first)
    assert check.is_all_right
    check = gpu_check.Check(parts, out, 600)
    check.run(environment, tmp_path)
    assert [outcome.name for outcome in check.outcomes] == ["crashes", "answers", "fails"]
    assert not check.is_all_right
    files = sorted(path.name for path in out.iterdir())
    assert files == ["gpu_check.log", "gpu_check.md"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in files)
    text = (out / "gpu_check.md").read_text()
    rows = re.findall(r"^\| (crashes|answers|fails) \| ", text, re.M)
    assert list(dict.fromkeys(rows)) == ["crashes", "answers", "fails"]
    assert os.uname().nodename not in text
    assert str(BENCHMARKS.parent) not in text
    assert "* crashes: ended with code -6" in text
    assert "| fails | is it good | not measured |  | ended with code 1: RuntimeError: no luck |" in text
    assert "about to crash" in (out / "gpu_check.log").read_text()


@pytest.mark.no_mpi
def test_parts_that_measure_leave_time_to_the_others():
    """Whatever hangs. The others begin when these have ended."""
    alone = [part.alone for part in PARTS]
    assert sorted(alone, reverse=True) == alone
    assert sum(part.limit + running.GRACE for part in PARTS if part.alone) <= 0.8 * gpu_check.LIMIT_SECONDS
    assert sum(part.limit for part in PARTS if part.alone) <= 0.7 * gpu_check.LIMIT_SECONDS


@pytest.mark.no_mpi
def test_stopped_check_writes_its_answers(environment, tmp_path):
    check = gpu_check.Check([Part(name, f"{name}:ask", name, 600) for name in ("hangs", "answers")], tmp_path, 600)

    def stop():
        while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
            time.sleep(0.1)
        check.stop(0, None)

    threading.Thread(target=stop).start()
    check.run(environment, tmp_path)
    assert check.outcomes[0].why.startswith("ended with code -9")
    assert check.outcomes[1].why == "no time was left"
    assert _has_ended(int((tmp_path / "child").read_text()))


@pytest.mark.no_mpi
def test_command_without_a_gpu_exits_with_3_and_writes_nothing(tmp_path):
    program = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path), "--wheels", str(tmp_path)]
    hidden = {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "nothing can be checked here: CuPy" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.no_mpi
def test_parts_are_programs_with_questions_of_their_own():
    assert len({part.name for part in PARTS}) == len({part.question for part in PARTS}) == len(PARTS)
    for module, _, function in (part.ask.partition(":") for part in PARTS if part.ask != "tests"):
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.no_mpi
def test_parts_are_chosen_by_name():
    program = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--only", "kernels", "sprint"]
    done = subprocess.run(program, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'sprint'" in done.stderr


@pytest.mark.no_mpi
def test_table_of_recorded_rows():
    rows = {
        "pack": [
            Row("pack", "89 % | 47 us", "at least 85 %: met"),
            Row("unpack", "not measured", note="no time was left"),
        ],
        "tests": [Row("1 rank", "9 passed", "right"), Row("2 ranks", "1 failed", WRONG, "slow\nvery")],
    }
    lines = table({"GPU": "one"}, rows, ["Parts: none."]).splitlines()
    assert "* GPU: one" in lines
    assert any(line.startswith("4 answers: 1 wrong, 1 not measured.") for line in lines)
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| pack | pack | 89 % \\| 47 us | at least 85 %: met |  |",
        "| pack | unpack | not measured |  | no time was left |",
        "| tests | 1 rank | 9 passed | right |  |",
        "| tests | 2 ranks | 1 failed | **wrong** | slow very |",
    ]


@pytest.mark.no_mpi
def test_answer_that_was_cut_off_is_no_answer(tmp_path):
    path = tmp_path / "part.jsonl"
    report = Report(path)
    report.add("is it there", "yes")
    report.add("is it fast", "no", goal=("yes", False))
    assert read_rows(path) == report.rows == [Row("is it there", "yes"), Row("is it fast", "no", "yes: missed")]
    path.write_text(path.read_text()[:-20])
    assert read_rows(path) == report.rows[:1]
    assert read_rows(tmp_path / "nowhere") == []


@pytest.mark.no_mpi
def test_wheels_are_installed_where_programs_find_their_libraries(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some-1.0-py3-none-any.whl", "w") as archive:
        program = zipfile.ZipInfo("some-1.0.data/data/bin/mpiexec")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, "#!/bin/sh\necho sum 2 Library 9.5\n")
        archive.writestr("some-1.0.data/data/lib/libmpi.so.12", "library")
        archive.writestr("some/__init__.py", "")
        archive.writestr("some-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
        archive.writestr("some-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("some-1.0.dist-info/RECORD", "")
    made = prepare(wheels, tmp_path / "own")
    assert made.mpi == "Library 9.5, of 1 wheels"
    assert made.launcher == (str(tmp_path / "own" / "site" / "bin" / "mpiexec"),)
    library = Path(made.variables["MPI4PY_LIBMPI"])
    assert library.read_text() == "library"
    assert str(library.parent) in made.variables["LD_LIBRARY_PATH"]
    found = [Path(folder) / "some" for folder in made.variables["PYTHONPATH"].split(os.pathsep)]
    assert any(folder.is_dir() for folder in found)


@pytest.mark.no_mpi
def test_files_with_gpu_tests_are_found():
    found = {Path(name).stem for name in running.files_with_gpu_tests()}
    assert found >= {"test_nccl", "test_host_staging", "test_device_overlap", "test_compression"}
    assert not found & {"test_gpu_support", "test_results"}


@pytest.mark.no_mpi
def test_tiny_check_runs_tests_that_keep_the_settings_of_their_part():
    """MPIDIST_NCCL=0 and pretended nodes: tests with the fixtures `emulated` and `group` have their own."""
    parts = {part.name: part for part in PARTS}
    tiny = Environment({"GPU_CHECK_TINY": "1"}, (), "")
    words = running.words_of_tests(parts["right-staged"], tiny)
    assert words[words.index("--ranks") + 1] == "2,3,4"
    assert {word for word in words if word.endswith(".py")} == {*running.KEEPING}
    for file in running.KEEPING:
        (names,) = re.findall(r"^from host_cuda.gpus import (.*)", (ROOT / file).read_text(), re.M)
        assert not {"emulated", "group", "use_own_settings"} & set(names.split(", ")), file
    whole = running.words_of_tests(parts["right-1"], Environment({}, (), ""))
    assert [word for word in whole if word.endswith(".py")] == running.files_with_gpu_tests()
    assert running.words_of_tests(parts["right-one-process"], tiny)[-1] == parts["right-one-process"].words[1]


@pytest.mark.no_mpi
@pytest.mark.usefixtures("outside_mpi")
@pytest.mark.parametrize(
    ("body", "got", "verdict", "note"),
    [
        ("assert 1 + 1 == 3", "1 failed", WRONG, "ended with code 1: 1 failed in"),
        ("assert 1 + 1 == 2", "1 passed", "right", ""),
        ("pytest.skip('needs a GPU')", "not measured", "", "SKIPPED [1] "),
        ("import time; time.sleep(600)", "no tests ran", WRONG, "not done within 20 s"),
        ("", "ERROR: file or directory not found: tests/test_nowhere.py", WRONG, "ended with code 4: ERROR"),
    ],
)
def test_tests_that_need_a_gpu_are_counted(tmp_path, body, got, verdict, note):
    """Also those that take too long, and a file that is not there."""
    path = tmp_path / "test_it.py"
    if body:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
        path.write_text(f"import pytest\n@pytest.mark.gpu\ndef test_it():\n    {body}\n")
    files = (str(path), "-p", "mpi_session.plugin") if body else ("tests/test_nowhere.py",)
    limit = 20 if "sleep" in body else 600  # the others are not about time
    part = Part("tests", "tests", "are they right", limit, words=("1", *files))
    may_skip = {**os.environ, "CI": "", "TEST_CI": ""}  # as `make test-gpu-check` says
    outcome = running.run(part, 600, Environment(may_skip, ("mpiexec",), ""), tmp_path)
    (row,) = outcome.rows
    assert (row.got, row.verdict) == (got, verdict), outcome
    assert row.note.startswith(note)
    assert ("FAILED " in row.note) == (got == "1 failed")


@pytest.mark.no_mpi
def test_text_gives_medians_and_ends():
    assert text_of(np.arange(101) * 1e-6) == "50 us (5 us to 95 us)"
    assert text_of(np.array([0.0123] * 3)) == "12.3 ms (12.3 ms to 12.3 ms)"
