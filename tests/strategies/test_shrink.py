"""Jobs that lose ranks and go on with the others in the same processes, by `shrink`."""

import pytest
from jobs.faults import BLOCKS, FOUR, UNEVEN_ALONE, job
from jobs.ulfm import HAS_ULFM, survivor
from mpi4py import MPI

from mpidist import MultiWorkerMirroredStrategy
from mpidist.errors import UnavailableError

__all__ = ["job", "survivor"]

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
TRAINING = """
strategy.close()
strategy = mpidist.MultiWorkerMirroredStrategy(on_rank_lost="shrink", replicas=4)
attempt("too early", strategy.shrink)

def gradient(step):
    return np.full(3, 0.1 * step / (1 + mpidist.get_replica_context().replica_id_in_sync_group))

def variable(value):
    with strategy.scope():
        return mpidist.Variable(value)

def train(weights, first, losses):
    global strategy
    step = first
    while step < 20:
        if losses.get(step) == rank:
            LOSE
        try:
            weights.assign_add(strategy.reduce("sum", strategy.run(gradient, args=(step,))))
            step += 1
        except PeerFailedError as error:
            old, strategy = strategy, strategy.shrink()
            note("shrunk", kind=str(strategy.size), text=str(error))
            attempt("again", old.shrink)
            weights, step = variable(weights.numpy()), strategy.broadcast_object(step)
    return weights.numpy().tolist()

attempt("lossy", lambda: train(variable(np.zeros(3)), 0, LOSSES))
attempt("undisturbed", lambda: train(variable(np.zeros(3)), 0, {}))
"""

if HAS_ULFM:

    @pytest.mark.no_mpi
    @pytest.mark.parametrize(
        ("placement", "losses", "on_error", "status", "lose"),
        [
            (FOUR, {5: 0, 9: 3}, "abort", 0, KILL),
            (BLOCKS, {5: 3}, "raise", 3, KILL),
            (UNEVEN_ALONE, {0: 0, 1: 2}, "abort", 0, KILL),
            (FOUR, {5: 3, 9: 0}, "abort", 0, "raise BaseException('mine')"),  # which MPI_Abort does not end
        ],
        ids=str,
    )
    def test_shrink_after_losses_trains_to_the_same_bits(survivor, placement, losses, on_error, status, lose):
        """Also where nobody sees the process of the lost rank; and the program ends with its own exit code."""
        body = TRAINING.replace("LOSSES", repr(losses)).replace("LOSE", lose) + f"sys.exit({status})"
        ended = survivor(body, placement, MPIDIST_ON_ERROR=on_error)
        assert ended.status == status, ended
        assert "exit code 75" not in ended.err
        lossy, undisturbed = ended.of("lossy"), ended.of("undisturbed")
        assert sorted(lossy) == sorted({*range(placement.size)} - {*losses.values()})
        assert len({note.text for note in (*lossy.values(), *undisturbed.values())}) == 1, ended
        for rank in lossy:
            assert "follows a call that raised PeerFailedError" in ended.of("too early")[rank].text
            assert ended.of("shrunk")[rank].kind == str(placement.size - len(losses))
            assert "the surviving ranks can continue with strategy.shrink()" in ended.of("shrunk")[rank].text
            assert "on a closed strategy" in ended.of("again")[rank].text

    @pytest.mark.no_mpi
    def test_program_that_fails_after_shrink_ends_with_an_error_and_whole_files(survivor, tmp_path):
        """Whatever hook it has, which keeps its objects alive to the end of Python."""
        ending = f"""
with strategy.scope():
    attempt("in a scope", strategy.shrink)
log = open("{tmp_path}/log" + str(rank), "w")
log.write("last words")

def hook(kind, error, trace):
    print("hook:", log.name, error)

sys.excepthook = hook
raise ValueError("mine")
"""
        ended = survivor(TRAINING.replace("LOSSES", "{5: 1}").replace("LOSE", KILL) + ending, FOUR)
        assert ended.status not in (0, 75), ended
        assert [tmp_path.joinpath(f"log{rank}").read_text() for rank in (0, 2, 3)] == ["last words"] * 3
        assert all("scope()" in note.text for note in ended.of("in a scope").values())

    @pytest.mark.no_mpi
    @pytest.mark.parametrize("call", ["reduce('sum', np.ones(1 + rank))", "reduce('sum', rank != 3 or 1 / 0)"])
    def test_error_that_no_rank_catches_ends_the_job(survivor, call):
        make = 'strategy.close()\nstrategy = mpidist.MultiWorkerMirroredStrategy(on_rank_lost="shrink")'
        ended = survivor(f"{make}\nreduce()\nstrategy.{call}", FOUR)
        assert ended.status not in (0, 75), ended


@pytest.mark.ranks(1, 2)
def test_on_rank_lost_shrink_without_ulfm_names_the_launcher_option():
    """This launcher ends a job of which a process is lost."""
    with pytest.raises(UnavailableError, match="mpirun --with-ft ulfm"):
        MultiWorkerMirroredStrategy(on_rank_lost="shrink")
    with pytest.raises(ValueError, match="on_rank_lost must be 'end' or 'shrink', got 'ignore'"):
        MultiWorkerMirroredStrategy(on_rank_lost="ignore")
    with (
        MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD) as strategy,
        pytest.raises(RuntimeError, match='not made with on_rank_lost="shrink"'),
    ):
        strategy.shrink()
