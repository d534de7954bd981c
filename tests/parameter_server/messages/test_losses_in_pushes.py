"""Workers that are killed while they push and read large variables: nobody waits for them."""

from __future__ import annotations

import pytest
from jobs.faults import THREE, TWO, Job, Placement, job

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

PUSHES = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy()
if strategy.is_ps:
    attempt("serve", strategy.serve)
else:
    with strategy.scope():
        large, small = mpidist.Variable(np.zeros(4 << 20)), mpidist.Variable(np.zeros(40_000))
    delta = np.ones(4 << 20)
    def pushes():
        note("pushing")
        while True:
            large.assign_add(delta)
            small.assign_add(delta[:40_000])
            value = large.numpy()
            assert (value == value[0]).all(), value
    if is_faulty:
        def die():
            await_notes("pushing", *range(size - 1))
            time.sleep({seconds})
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=die).start()
    attempt("pushes", pushes)
os._exit(0)
"""


@pytest.mark.core
@pytest.mark.parametrize(("placement", "seconds"), [(TWO._replace(faulty=0), 0.2), (THREE, 0.27)])
def test_a_worker_that_is_killed_in_a_push_is_named(job: Job, placement: Placement, seconds: float) -> None:
    """By its server, also where that waits for it alone, and by the other worker."""
    ended = job(PUSHES.format(seconds=seconds), placement, is_blind=True)
    server = len(placement.nodes) - 1
    note = ended.of("serve")[server]
    assert note.kind == "PeerFailedError"
    assert f"the process of rank {placement.faulty} of" in note.text
    for rank, other in ended.of("pushes").items():
        assert rank != placement.faulty
        assert other.kind in ("PeerFailedError", "UnavailableError"), other
