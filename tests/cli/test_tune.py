"""`python -m mpidist tune`: what it measures is kept, found again, and never in the way."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi_session import clean_environment

from mpidist.__main__ import run_command
from mpidist.cli import measure_costs
from mpidist.cli.measure_costs import measure_cost_model
from mpidist.cli.tune import explain
from mpidist.transport.costs.cost_file import TuningKey, load_tuned, save_cost_model, tuning_path
from mpidist.transport.costs.cost_model import CostModel, name_placement
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import load_mpi

KEY = TuningKey((2, 2), "MPICH", "A processor")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TUNE_DIR", str(tmp_path))
    return tmp_path


def tune(capfd, *arguments, status=0):
    """Run the command, and return what it prints."""
    assert run_command(["tune", *arguments]) == status
    return capfd.readouterr().out


@pytest.mark.no_mpi
def test_tune_stores_and_shows_its_measurements(folder, capfd):
    assert "mpidist's own numbers, not measured here: there is no " in tune(capfd, "--show")
    done = tune(capfd, "--seconds", "0.1")
    (file,) = folder.iterdir()
    assert f"Written to {file}" in done
    content = json.loads(file.read_text())
    assert content["format"] == 1
    assert content["key"]["placement"] == [1]
    assert set(content["model"]) >= set(content["measured"]) >= {"call_seconds", "add_bytes_per_second"}
    assert os.uname().nodename not in file.read_text().replace(content["key"]["processor"], "")
    assert f"Measured at {content['date']}, from {file}" in tune(capfd, "--show")


@pytest.mark.no_mpi
def test_tune_warns_of_rounds_that_differ_widely(folder, capfd, monkeypatch):
    times, first_slow = [0.0], 10_000

    def read_clock():
        times.append(times[-1] + (7.5e-3 if len(times) > first_slow else 1e-3))
        return times[-1]

    monkeypatch.setattr(measure_costs, "time", SimpleNamespace(perf_counter=read_clock))
    assert "uncertain" not in tune(capfd, "--seconds", "0.02")
    times, first_slow = [0.0], len(times) * 3 // 4  # three rounds to begin with, and six of the nine that count
    assert "took 7.5 times as long as fast ones" in tune(capfd, "--seconds", "0.02")


@pytest.mark.no_mpi
def test_show_answers_for_other_placements(folder, capfd):
    done = tune(capfd, "--show", "--placement", "64,64")
    assert "128 ranks on 2 nodes, 64 on each" in done
    assert "two_shot from " in done
    assert not list(folder.iterdir())


@pytest.mark.no_mpi
def test_tune_reports_numbers_it_cannot_store(folder, capfd, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("MPIDIST_TUNE_DIR", str(folder / "file" / "below"))
    assert "The numbers were not kept: " in tune(capfd, "--seconds", "0.02", status=1)
    monkeypatch.setenv("MPIDIST_TUNE_DIR", str(folder))
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", "0")
    assert "The numbers are not kept: MPIDIST_PRETEND_NODES" in tune(capfd, "--seconds", "0.02")
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["tuna"], "invalid choice"),
        (["tune", "--seconds", "0"], "is no number of seconds"),
        (["tune", "--seconds", "nan"], "is no number of seconds"),
        (["tune", "--placement", "2,2"], "goes with --show"),
        (["tune", "--show", "--placement", "2,0"], "is no placement"),
        (["tune", "--show", "--placement", "two"], "is no placement"),
    ],
)
@pytest.mark.no_mpi
def test_tune_refuses_wrong_arguments(arguments, complaint, capfd):
    with pytest.raises(SystemExit) as end:
        run_command(arguments)
    assert end.value.code == 2
    assert complaint in capfd.readouterr().err


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("name", "example"), [("tune", "mpirun -n 4 python -m mpidist tune"), ("flight", "python -m mpidist flight mpi")]
)
def test_help_of_a_command_starts_no_mpi(name, example):
    program = (
        f"import sys, runpy\nsys.argv = ['mpidist', '{name}', '--help']\n"
        "try:\n    runpy.run_module('mpidist', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert example in done.stdout


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("placement", "transport"), [("one node", "auto"), ("cyclic", "auto"), ("growing", "mpi")], indirect=["placement"]
)
def test_ranks_measure_together_and_alike(placement, transport, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRANSPORT", transport)
    group = SyncGroup.from_mpi(None)
    try:
        found = _, measured, _ = measure_cost_model(group.levels, 0.02)
        assert set(load_mpi().COMM_WORLD.allgather(found)) == {found}
        several = max(group.topology.node_sizes) > 1
        assert ("mpi_seconds" in measured) == several
        assert ("link_bytes_per_second" in measured) == (group.topology.num_nodes > 1)
        assert ("sync_seconds" in measured) == (several and transport == "auto")
        assert ("copy_bytes_per_second" in measured) == (not several or transport == "auto")
    finally:
        group.close()


@pytest.mark.no_mpi
def test_saved_numbers_are_found(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {"MPIDIST_TUNE_DIR": "~/new/folder"}
    assert load_tuned(KEY, environ) is None
    model = CostModel(link_seconds=3e-6)
    path = save_cost_model(KEY, model, ("link_seconds",), environ)
    assert [path] == list((tmp_path / "new" / "folder").iterdir())
    tuned = load_tuned(KEY, environ)
    assert tuned is not None
    assert tuned.model == model
    assert tuned.measured == ("link_seconds",)
    for other in (TuningKey((4,), "MPICH", "A processor"), TuningKey((2, 2), "Open MPI", "A processor")):
        assert load_tuned(other, environ) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: "", "Expecting value"),
        (lambda text: text[:-20], "line "),
        (lambda text: "[1]", "it is no JSON object"),
        (lambda text: "[" * 100_000, "while decoding a JSON array"),
        (lambda text: text.replace('"format": 1', '"format": 99'), "its format is 99"),
        (lambda text: text.replace("MPICH", "Other MPI"), "measured for another machine"),
        (lambda text: text.replace('"sync_seconds": 1.5e-06', '"sync_seconds": -1'), "sync_seconds must be"),
        (lambda text: text.replace('"sync_seconds": 1.5e-06', '"sync_seconds": NaN'), "sync_seconds must be"),
        (lambda text: text.replace('"sync_seconds": 1.5e-06', '"sync_seconds": 1e300'), "sync_seconds must be"),
        (lambda text: text.replace("sync_seconds", "other"), "a cost model has"),
        (lambda text: text.replace('"measured": []', '"measured": 7'), "not iterable"),
    ],
)
@pytest.mark.no_mpi
def test_spoilt_files_are_left_with_one_warning(spoil, reason, tmp_path, caplog):
    environ = {"MPIDIST_TUNE_DIR": str(tmp_path)}
    path = save_cost_model(KEY, CostModel(), (), environ)
    path.write_text(spoil(path.read_text()))
    with caplog.at_level(logging.WARNING, "mpidist"):
        for _ in range(2):  # as each strategy does
            assert load_tuned(KEY, environ) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.no_mpi
def test_files_that_cannot_be_read_are_left_with_one_warning(tmp_path, caplog):
    environ = {"MPIDIST_TUNE_DIR": str(tmp_path)}
    path = tuning_path(KEY, environ)
    path.mkdir()  # root may read any file, but no folder
    assert load_tuned(KEY, environ) is None
    path.rmdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert load_tuned(KEY, environ) is None
    assert len(caplog.records) == 2


@pytest.mark.no_mpi
def test_folder_is_the_chosen_one_or_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_path(KEY, {}).parent == tmp_path / ".cache" / "mpidist"
    assert tuning_path(KEY, {"XDG_CACHE_HOME": "/x"}).parent == Path("/x/mpidist")
    assert tuning_path(KEY, {"XDG_CACHE_HOME": "/x", "MPIDIST_TUNE_DIR": "/y"}).parent == Path("/y")


@pytest.mark.no_mpi
@pytest.mark.parametrize("placement", [(1,), (2,), (4, 2, 1), (128,) * 1024])
def test_tune_explanation_is_short_and_names_chosen_algorithm(placement):
    model = CostModel()
    lines = explain(model, placement).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 120
    if sum(placement) > 1:
        assert name_placement(placement) in lines[0]
        assert sum(f" {model.choose(1 << 20, placement)} " in line for line in lines) >= 1
