"""Which ranks write what is equal on all of them, and that any number of ranks restores it."""

import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file, save_file
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

from mpidist import MultiWorkerMirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.checkpoint.dealing import deal
from mpidist.context_stack import parts_of

pytestmark = pytest.mark.core

LARGE = 400_003  # of 8 bytes


def made(strategy: Any, value: int) -> Checkpoint:
    with strategy.scope():
        leaves = [np.arange(size, dtype=np.int64) * value for size in (3, 0, LARGE, 70_000, 1)]
        return Checkpoint(leaves=leaves, kernel=Variable(np.full((301, 503), float(value))), step=value)


def sizes_in(path: Path) -> dict[int, int]:
    """The bytes of the arrays that each rank has written."""
    files = {int(file.stem.partition("-")[2]): load_file(file) for file in path.glob("*.safetensors")}
    return {rank: sum(array.nbytes for array in arrays.values()) for rank, arrays in sorted(files.items())}


def restore_once_a_node(comm: Intracomm, checkpoint: Checkpoint, nbytes: int, path: Path, partial: bool) -> None:
    """Each rank reads a share, and JSON files, of each of which the first bytes come twice."""
    before = bytes_read()
    checkpoint.restore(path, partial=partial)
    read = comm.allgather(bytes_read() - before)
    topology = parts_of(checkpoint.strategy).topology
    for of_node in topology.nodes if topology.size > 1 else [[comm.rank]]:
        assert 0 <= sum(read[rank] for rank in of_node) - nbytes < 100_000 * len(of_node), (read, nbytes)
        assert nbytes < 1 << 21 or max(read[rank] for rank in of_node) < nbytes * (0.7 if len(of_node) > 1 else 1.1)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("background", [False, True])
def test_writers_all_ranks_write_as_much_and_any_number_restores(
    comm: Intracomm, placement: object, folder: Path, background: bool
) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        manager = CheckpointManager(made(strategy, 5), folder, background=background)
        path = Path(manager.save())
        manager.wait()
        comm.Barrier()
        sizes = sizes_in(path)
        total = 8 * (3 + LARGE + 70_000 + 1 + 301 * 503)
        assert (list(sizes), sum(sizes.values())) == (list(range(comm.size)), total)
        assert max(sizes.values()) - min(sizes.values()) < 200_000
        record = manager.last_save
        assert record is not None
        assert (record.nbytes, record.extra_bytes) == (sizes[comm.rank], sizes[comm.rank] * background)
        for ranks in (comm, MPI.COMM_SELF):
            with MultiWorkerMirroredStrategy(comm=ranks) as other:
                restored, saved = made(other, 0), made(other, 5)
                restore_once_a_node(comm, restored, total, path, partial=False)
                restore_once_a_node(comm, Checkpoint(kernel=restored.kernel), 8 * 301 * 503, path, partial=True)
                assert all((one == two).all() for one, two in zip(restored.leaves, saved.leaves, strict=True))
                assert (restored.kernel.numpy() == 5).all()
                assert restored.step == 5


def test_restore_of_files_that_rank_0_alone_sees_sends_what_is_equal(
    comm: Intracomm, placement: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        made(strategy, 5).write(folder / "0" / "one", writers=1)
        (folder / f"{comm.rank}").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / f"{comm.rank}")
        restored = made(strategy, 0)
        restored.restore("one")
        assert (restored.kernel.numpy() == 5).all()
        assert (restored.leaves[2] == np.arange(LARGE) * 5).all()


def test_writers_as_many_as_given_write(comm: Intracomm, placement: object, folder: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        topology = parts_of(strategy).topology
        checkpoint = made(strategy, 5)
        for writers in ("per node", 2, 100):
            ranks = list(sizes_in(Path(checkpoint.write(folder / f"{writers}", writers=writers))))
            leaders = [of_node[0] for of_node in topology.nodes]
            assert ranks == leaders if writers == "per node" else len(ranks) == min(writers, comm.size)
            assert len({topology.node_of_rank[rank] for rank in ranks}) == min(len(ranks), topology.num_nodes)
        comm.Barrier()
        with raises_everywhere(comm, ValueError, "writers must be 'all', 'per node' or a number of ranks, got 'each'"):
            checkpoint.write(folder / "one", writers="each")
        with pytest.raises(ValueError, match="writers must be"):
            CheckpointManager(checkpoint, folder, writers=0)


@pytest.mark.ranks(3)
def test_writers_damaged_piece_is_named_and_nothing_is_changed(comm: Intracomm, folder: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        path = Path(made(strategy, 5).write(folder / "one"))
        if comm.rank == 0:
            file = path / f"rank-{comm.size - 1}.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        comm.Barrier()
        restored = made(strategy, 0)
        with raises_everywhere(comm, OSError, rf"rank-{comm.size - 1}\.safetensors' is damaged: another checksum"):
            restored.restore(path)
        assert not any(leaf.any() for leaf in restored.leaves)


@pytest.mark.ranks(3)
def test_restore_of_a_checkpoint_of_an_earlier_version(comm: Intracomm, folder: Path) -> None:
    """What is equal was in one file, `all`."""
    path, weights = folder / "old", np.arange(6.0).reshape(2, 3)
    if comm.rank == 0:
        path.mkdir()
        save_file({"weights": weights}, path / "all.safetensors")
        about = {"arrays": {"weights": ["float64", [2, 3], zlib.crc32(weights.data)]}, "values": {"step": 7}}
        (path / "all.json").write_text(json.dumps(about))
        parts = {"all": zlib.crc32((path / "all.json").read_bytes())}
        owners = {"weights": "all", "step": "all"}
        manifest = {"format": "mpidist checkpoint", "version": 2, "ranks": 3, "replicas": 3}
        text = json.dumps({**manifest, "owners": owners, "parts": parts})[:-1].encode()
        (path / "manifest.json").write_bytes(text + b', "checksum": %d}' % zlib.crc32(text))
    comm.Barrier()
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(weights=Variable(np.zeros((2, 3))), step=0)
        checkpoint.restore(path)
        assert (checkpoint.weights.numpy() == weights).all()
        assert checkpoint.step == 7


@pytest.mark.no_mpi
def test_deal_covers_every_array_and_no_rank_has_much_more_than_its_share() -> None:
    for seed in range(200):
        random = Random(seed)
        sizes = {str(at): (random.randint(0, 1) * int(2 ** random.uniform(0, 24)), 8) for at in range(9)}
        ranks = list(range(random.randint(1, 9)))
        loads = dict.fromkeys(ranks, 0)
        for name, pieces in deal(sizes, ranks).items():
            bounds = [bound for _, begin, end in pieces for bound in (begin, end)]
            assert (bounds[0], bounds[-1], bounds[1:-1:2]) == (0, sizes[name][0], bounds[2:-1:2])
            for rank, begin, end in pieces:
                loads[rank] += 8 * (end - begin)
        total = sum(loads.values())
        assert max(loads.values()) <= total / max(1, min(len(ranks), total >> 20)) + (1 << 18), seed
