"""`python -m mpidist checkpoint`: which checkpoints are whole, and in which leaves two differ."""

import os
import subprocess
import sys

import numpy as np
import pytest
from mpi_session import clean_environment

from mpidist import MirroredStrategy
from mpidist.__main__ import run_command
from mpidist.checkpoint import Checkpoint, CheckpointManager

pytestmark = pytest.mark.ranks(1)


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints; of `weights`, two of six elements differ."""
    with MirroredStrategy() as strategy, strategy.scope():
        checkpoint = Checkpoint(weights=np.zeros((2, 3)), ids=np.arange(4), none=np.zeros(0), step=10)
        manager = CheckpointManager(checkpoint, tmp_path)
        manager.save(10)
        checkpoint.weights[1, 0], checkpoint.weights[1, 2], checkpoint.step = -0.5, np.nan, 20
        manager.save(20)
    return tmp_path


def printed(capsys, *words):
    status = run_command(["checkpoint", *map(str, words)])
    return status, capsys.readouterr().out.splitlines()


def test_checkpoints_are_listed_in_the_order_of_saves(folder, capsys):
    status, (head, *lines) = printed(capsys, folder)
    assert (status, head.split()) == (0, ["checkpoint", "step", "size", "saved", "ranks", "whole"])
    assert [(line.split()[:2], line.split()[-2:]) for line in lines] == [
        (["ckpt-10", "10"], ["1", "yes"]),
        (["ckpt-20", "20"], ["1", "yes"]),
    ]
    assert printed(capsys, folder / "ckpt-20")[1] == [head, lines[1]]


def test_checkpoint_list_names_the_current_folder_and_a_hidden_one(folder, capsys, monkeypatch):
    (folder / "ckpt-10").rename(folder / ".last")
    (folder / "ckpt-20" / "notes").mkdir()
    for here, words, name in (("ckpt-20", ".", "ckpt-20"), ("ckpt-20/notes", "..", "ckpt-20"), (".", ".last", ".last")):
        monkeypatch.chdir(folder / here)
        status, lines = printed(capsys, words)
        assert (status, [line.split()[0] for line in lines]) == (0, ["checkpoint", name])


def test_checkpoint_list_has_a_checkpoint_whose_replacement_was_killed(folder, capsys):
    """Which `restore` finds: it stands beside its place, under a hidden name."""
    lines = printed(capsys, folder)
    (folder / "ckpt-20").rename(folder / ".ckpt-20.0123456789abcdef.old")
    assert printed(capsys, folder) == lines
    (folder / ".ckpt-20.fedcba9876543210.new").mkdir()  # as far as it was written
    assert printed(capsys, "--read", folder) == lines


@pytest.mark.parametrize("damage", ["cut", "flip", "no manifest", "no arrays"])
def test_checkpoint_list_damaged_is_not_whole(folder, capsys, damage):
    (arrays,) = (folder / "ckpt-10").glob("*.safetensors")
    data = bytearray(arrays.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        arrays.write_bytes(data)
        assert printed(capsys, folder)[0] == 0
    elif damage == "cut":
        arrays.write_bytes(data[:-1])
    elif damage == "no arrays":
        arrays.unlink()
    else:
        (folder / "ckpt-10" / "manifest.json").unlink()
    status, lines = printed(capsys, folder, *["--read"] * (damage == "flip"))
    assert status == 1
    assert sorted(" no: " in line for line in lines) == [False, False, True], lines


def test_checkpoint_diff_names_leaves_elements_and_the_greatest_difference(folder, capsys):
    one, other = folder / "ckpt-10", folder / "ckpt-20"
    assert printed(capsys, "diff", one, one) == (0, [f"{one} (step 10) and {one} (step 10) are equal in 4 leaves"])
    assert printed(capsys, "diff", one, other) == (
        1,
        [
            f"{one} (step 10) and {other} (step 20) differ in 2 of 4 leaves:",
            "  weights: 2 of 6 elements differ, by at most 0.5; the first: 0.0 and -0.5 at [1, 0]",
            "  step: 10 and 20",
        ],
    )


def test_checkpoint_diff_lists_unlike_shapes_and_names(folder, capsys):
    with MirroredStrategy() as strategy, strategy.scope():
        Checkpoint(weights=np.zeros(6), ids=np.arange(4), more=np.nan, step=20).write(folder / "other")
    assert printed(capsys, "diff", folder / "other", folder / "other")[0] == 0
    status, lines = printed(capsys, "diff", folder / "ckpt-20", folder / "other")
    assert status == 1
    assert [line.partition(":")[0].strip() for line in lines[1:]] == ["none", "more", "weights"]
    assert lines[-1] == "  weights: float64[2, 3] and float64[6]"


@pytest.mark.parametrize(
    ("one", "step", "text"),
    [
        (np.int64(2**60), 1, "by at most 1; the first: 1152921504606846976 and 1152921504606846977 at [1]"),
        (np.uint64(2**64 - 2), 1, "by at most 1; the first: 18446744073709551614 and 18446744073709551615 at [1]"),
        (np.longdouble(1), np.finfo(np.longdouble).eps, f"by at most {float(np.finfo(np.longdouble).eps):.6g}; "),
    ],
)
def test_checkpoint_diff_of_wide_numbers_is_exact(tmp_path, capsys, one, step, text):
    with MirroredStrategy() as strategy, strategy.scope():
        checkpoint = Checkpoint(state=np.array([0, one], one.dtype))
        checkpoint.write(tmp_path / "one")
        checkpoint.state[1] += one.dtype.type(step)
        checkpoint.write(tmp_path / "other")
    status, lines = printed(capsys, "diff", tmp_path / "one", tmp_path / "other")
    assert status == 1
    assert f"  state: 1 of 2 elements differ, {text}" in lines[-1]


def test_checkpoint_command_closed_pipe_exits_as_by_sigpipe(folder):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpidist", "checkpoint", str(folder)]
    done = subprocess.run(command, env=clean_environment(), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["checkpoint", "."], ["run", "-n", "1", "--dry-run", "-m", "json"]])
def test_command_with_a_full_disk_behind_its_output_ends_with_2(folder, words):
    command = [sys.executable, "-m", "mpidist", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=folder, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("words", [["none"], ["."], ["diff", "ckpt-10", "none"], ["diff", "ckpt-10"], ["a", "b"], []])
def test_checkpoint_command_misuse_ends_with_2(folder, words, monkeypatch):
    monkeypatch.chdir(folder if "diff" in words else "/")
    try:
        status = run_command(["checkpoint", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
