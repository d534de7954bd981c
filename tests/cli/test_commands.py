"""The command line as a whole, alone and on several ranks: what is wrong is said once, and without tracebacks."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from jobs.failing import PROJECT, end_of
from mpi_session.launch import Launcher

from mpidist.__main__ import run_command
from mpidist.cli import tune
from mpidist.cli.measure_costs import measure_cost_model
from mpidist.transport.failures.flight_files import write_flight
from mpidist.transport.stacks import Stack


def command(ranks, *arguments, **variables):
    """Run a command: alone, or on some ranks of the MPI library that these tests run with."""
    launch = [*Launcher.find(None).command, "-n", str(ranks)] if ranks > 1 else []
    return end_of([*launch, sys.executable, "-m", "mpidist", *arguments], OMP_NUM_THREADS="1", **variables)


@pytest.mark.no_mpi
@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "variables", "text"),
    [
        (2, {"MPIDIST_CHECK": "7"}, "mpidist doctor: rank 0: MPIDIST_CHECK='7' is not understood"),
        (1, {"MPI4PY_LIBMPI": "/none.so"}, "MPI:   mpidist needs mpi4py with an MPI library"),
    ],
)
def test_command_errors_are_printed_once(ranks, variables, text):
    done = command(ranks, "doctor", **variables)
    printed = done.out + done.err
    assert done.status == 1, printed
    assert printed.count(text) == 1, printed
    assert "Traceback" not in printed


@pytest.mark.core
@pytest.mark.no_mpi
def test_command_usage_error_is_printed_by_late_first_rank(tmp_path):
    """Open MPI's launcher ends it when another rank has failed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if '0' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n    time.sleep(1.5)\n"
    )
    done = command(2, "doctor", "--bogus", PYTHONPATH=f"{tmp_path}:{PROJECT}")
    assert (done.status, done.err.count("usage: mpidist doctor [-h]")) == (2, 1), done


@pytest.mark.core
@pytest.mark.no_mpi
def test_doctor_failed_finding_exits_with_1_without_colours(tmp_path):
    node = tmp_path / "node.json"
    node.write_text('{"nodes": [{"facts": {"mpidist": "another"}}]}')
    done = command(2, "doctor", "--expect", str(node))
    assert done.status == 1
    assert "  fail  mpidist on ranks 0-1 (" in done.out
    assert "Traceback" not in done.err
    assert "\x1b" not in done.out


@pytest.mark.no_mpi
@pytest.mark.parametrize(("name", "is_first"), [("doctor", True), ("tune", False), ("flight", True), ("trace", False)])
def test_command_error_prints_its_usage(name, is_first, capsys):
    words = [name, *(["merge", "x"] if name == "trace" else [])]
    with pytest.raises(SystemExit) as end:
        run_command(["--bogus", *words] if is_first else [*words, "--bogus"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: mpidist {name} [-h]")
    assert f"mpidist {name}: error: unrecognized arguments: --bogus" in err


@pytest.mark.no_mpi
@pytest.mark.parametrize(("rank", "is_told"), [("0", True), ("1", False)])
def test_help_is_printed_by_the_first_process(rank, is_told, capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, rank)
    with pytest.raises(SystemExit) as end:
        run_command(["--help"])
    assert not end.value.code
    assert ("doctor" in capsys.readouterr().out) == is_told


@pytest.mark.no_mpi
def test_command_escapes_characters_that_its_output_lacks(tmp_path):
    write_flight(tmp_path, 0, "ValueError: \u00dcberlauf", [], Stack(), 0)
    done = command(1, "flight", str(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.status, done.err) == (0, "")
    assert r"rank 0: ValueError: \xdcberlauf" in done.out


@pytest.mark.no_mpi
def test_numbers_of_tune_are_printed_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPIDIST_TUNE_DIR", str(tmp_path / "none"))
    done = command(1, "tune", "--seconds", "0.1", "--json", MPIDIST_TUNE_DIR=str(tmp_path))
    page = json.loads(done.out)
    assert "Measuring 1 rank" in done.err
    assert f"Written to {page['file']}" in done.err
    assert page["placement"] == [1]
    assert page["model"].items() <= json.loads(Path(page["file"]).read_text())["model"].items()
    assert run_command(["tune", "--show", "--json", "--placement", "2,2"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["file"], page["measured"]) == (None, [])
    assert set(page["choices"].values()) <= {"leader", "hierarchical", "two_shot"}


@pytest.mark.ranks(2)
def test_waits_of_tune_are_not_counted_from_the_start_of_the_machine(comm, tmp_path, monkeypatch, caplog, capfd):
    """A rank that is a moment late is no reason for a warning."""

    def measure_late(*arguments):
        time.sleep(0.2 * (comm.rank == 1))
        return measure_cost_model(*arguments)

    monkeypatch.setattr(tune, "measure_cost_model", measure_late)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setenv("MPIDIST_TUNE_DIR", comm.bcast(str(tmp_path)))
    assert run_command(["tune", "--seconds", "0.02"]) == 0
    out = capfd.readouterr().out
    assert ("Written to" in out) == ("Its ranks take turns on 1 cores" in out) == (comm.rank == 0)
    assert not [record for record in caplog.records if "has waited" in record.getMessage()]
