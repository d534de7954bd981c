"""Training with torch.distributed over the backend `mpidist`: DDP, FSDP2, ZeRO, DTensor, and loops of one's own."""

import pytest
import torch
import torch.distributed as dist
from support.everywhere import raises_everywhere
from torch.nn.parallel import DistributedDataParallel

from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

STEPS = 5


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def data_of(size):
    return torch.randn(STEPS, size, 6, 4, generator=torch.Generator().manual_seed(1))


def loss_of(model, x):
    return model(x).square().mean()


def trained(ranks, model, optimizer, combine=lambda model: None):
    """Train on this rank's batches, and return the weights."""
    rank, size = ranks
    for batch in data_of(size):
        optimizer.zero_grad()
        loss_of(model, batch[rank]).backward()
        combine(model)
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def wanted_weights(size):
    """Return the weights that one process has, with the means of all ranks' gradients, added in rank order."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in data_of(size):
        everyone = [torch.autograd.grad(loss_of(model, x), list(model.parameters())) for x in batch]
        for parameter, *parts in zip(model.parameters(), *everyone, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / size
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def require_weights(ranks, weights):
    """Require the weights of one process; DDP divides before it adds, which rounds other than for powers of two."""
    for one, wanted in zip(weights, wanted_weights(ranks[1]), strict=True):
        assert torch.equal(one, wanted) if ranks[1] != 3 else torch.allclose(one, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "default"),
)
def test_ddp_has_the_weights_of_one_process(ranks, placement, options):
    model = DistributedDataParallel(model_of(ranks[0]), bucket_cap_mb=1e-4, **options)
    require_weights(ranks, trained(ranks, model, torch.optim.Adam(model.parameters())))


def test_zero_redundancy_optimizer_has_the_weights_of_one_process(ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)
    require_weights(ranks, trained(ranks, model, optimizer))


def test_fsdp2_has_the_weights_of_ddp(ranks, placement):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import mpidist.torch

    ddp, sharded = DistributedDataParallel(model_of()), model_of()
    for part in (sharded[0], sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (ranks[1],)))
    for model in (ddp, sharded):
        trained(ranks, model, torch.optim.SGD(model.parameters(), 0.1))
    for one, other in zip(ddp.parameters(), sharded.parameters(), strict=True):
        whole = other.full_tensor()
        assert torch.equal(one, whole) if ranks[1] <= 2 else torch.allclose(one, whole, rtol=1e-4, atol=1e-6)
    with pytest.raises(TypeError, match="FSDP"):
        mpidist.torch.all_reduce_gradients(sharded)
    with pytest.raises(TypeError, match=r"broadcast: a DTensor of .*: pass its to_local\(\), or full_tensor\(\)"):
        mpidist.torch.broadcast(sharded)


@pytest.mark.ranks(2, 4)
def test_dtensor_layers_in_columns_and_rows_have_the_results_of_whole_ones(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole, x = model_of(), data_of(1)[0, 0]
    split = parallelize_module(
        model_of(), init_device_mesh("cpu", (ranks[1],)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    for model in (whole, split):
        loss_of(model, x).backward()
    assert torch.allclose(split(x), whole(x), atol=1e-6)
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, atol=1e-6)


def test_ddp_sends_nothing_before_the_last_part_of_a_batch(ranks):
    rank, size = ranks
    model, data = DistributedDataParallel(model_of()), data_of(size)
    with model.no_sync():
        loss_of(model, data[0, rank]).backward()
    loss_of(model, data[1, rank]).backward()
    gradients = [one.grad.clone() for one in model.parameters()]
    for one in gradients:
        dist.broadcast(one, 0)
    assert all(map(torch.equal, gradients, (one.grad for one in model.parameters())))


@pytest.mark.parametrize("finds_unused", [False, True])
def test_ddp_join_takes_unequal_numbers_of_batches(ranks, finds_unused):
    rank, size = ranks
    model = DistributedDataParallel(model_of(), find_unused_parameters=finds_unused)
    data = data_of(size)
    with model.join():
        for batch in data[: 2 + rank % 2]:
            model.zero_grad()
            loss_of(model, batch[rank]).backward()
    dist.barrier()


def test_ddp_takes_hooks_of_half_precision(ranks):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, reference = DistributedDataParallel(model_of()), DistributedDataParallel(model_of())
    model.register_comm_hook(None, fp16_compress_hook)
    for one in (model, reference):
        loss_of(one, data_of(ranks[1])[0, ranks[0]]).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-2, atol=1e-3)


def test_distributed_checkpoint_restores_the_model(ranks, comm, tmp_path):
    import torch.distributed.checkpoint as checkpoint

    folder, model, other = comm.bcast(tmp_path / "saved"), model_of(), model_of(seed=1)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    assert all(map(torch.equal, state.values(), model.state_dict().values()))


def test_all_reduce_gradients_gives_the_weights_of_one_process(ranks):
    import mpidist.torch

    model = model_of(ranks[0])
    optimizer = torch.optim.Adam(model.parameters())
    mpidist.torch.broadcast(model, optimizer)
    require_weights(ranks, trained(ranks, model, optimizer, mpidist.torch.all_reduce_gradients))


@pytest.mark.ranks(min=2)
def test_all_reduce_gradients_of_unequal_parameters_are_refused_before_the_first_step(ranks, comm):
    import mpidist.torch

    model = model_of()
    with torch.no_grad():
        model[2].bias += ranks[0]
    loss_of(model, data_of(ranks[1])[0, ranks[0]]).backward()
    before = model[2].bias.grad.clone()
    for _ in range(2):
        with raises_everywhere(comm, InvalidArgumentError, r"checksum of 2.bias: rank 0: .*torch\.broadcast\(model\)$"):
            mpidist.torch.all_reduce_gradients(model, "sum")
    mpidist.torch.broadcast(model)
    own = model[2].bias.grad.clone()
    mpidist.torch.all_reduce_gradients(model, "sum")
    assert torch.allclose(model[2].bias.grad, sum(comm.allgather(own)))
    assert torch.equal(own, before)  # refused before data moved
    with torch.no_grad():
        model[2].bias += ranks[0]
    mpidist.torch.all_reduce_gradients(model)


@pytest.mark.ranks(min=2)
def test_all_reduce_gradients_takes_missing_ones_for_zeros(ranks):
    import mpidist.torch

    rank, size = ranks
    model = model_of()
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.ones_like(parameter) if rank else None
    mpidist.torch.all_reduce_gradients(model, op="sum")
    assert [one.grad is not None for one in model.parameters()] == [True, True, False, False]
    assert model[0].bias.grad.tolist() == [size - 1] * 8


def embeddings(names, values, is_sparse=False):
    """Make layers whose weights and gradients are `values`, by name."""
    layers = {name: torch.nn.Embedding(1, 1, sparse=is_sparse) for name in names}
    for name, layer in layers.items():
        torch.nn.init.constant_(layer.weight, values[name])
        layer(torch.tensor(0)).backward(torch.tensor([values[name]]))
    return torch.nn.ModuleDict(layers)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_parameters_are_matched_by_name_in_any_order(ranks, is_sparse):
    import mpidist.torch

    values = {"up": 1.0, "down": 8.0}
    model = embeddings(sorted(values, reverse=ranks[0] % 2 == 1), values, is_sparse)
    mpidist.torch.all_reduce_gradients(model)
    assert {name: one.weight.grad.to_dense().item() for name, one in model.items()} == values
    mpidist.torch.broadcast(model)
    assert {name: one.weight.item() for name, one in model.items()} == values


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_parameters_of_other_names_are_refused_on_all_ranks(ranks, is_sparse):
    import mpidist.torch

    names = ["up", "down"]
    model = embeddings(names, {"up": 1.0, "down": 8.0}, is_sparse)
    model[names[ranks[0] % 2]].requires_grad_(False)
    model["all"] = torch.nn.Linear(1, 1, bias=False)
    model["all"].weight.grad = torch.full((1, 1), float(ranks[0]))
    with pytest.raises(InvalidArgumentError, match=r"down.weight'.*up.weight'"):
        mpidist.torch.all_reduce_gradients(model)
    assert model["all"].weight.grad.item() == ranks[0]
    model.register_buffer(names[ranks[0] % 2] + "_mean", torch.zeros(1))
    with pytest.raises(InvalidArgumentError, match=r"'up_mean'.*'down_mean'"):
        mpidist.torch.broadcast(model)
    assert [model[name].weight.item() for name in names] == [1.0, 8.0]


@pytest.mark.ranks(min=2)
def test_arguments_of_one_rank_are_refused_on_all_ranks(ranks):
    import mpidist.torch

    model = model_of(ranks[0])
    before = model[0].weight.clone()
    adam = torch.optim.Adam(model.parameters())
    for other in (None, torch.optim.SGD(model.parameters())):
        with pytest.raises(InvalidArgumentError, match=r"rank 0: mpidist\.torch\.broadcast with optimizer Adam; rank"):
            mpidist.torch.broadcast(model, other if ranks[0] else adam)
    assert torch.equal(model[0].weight, before)
    with pytest.raises(InvalidArgumentError, match=r'an error on rank 0.*\n.*ValueError: op must be "mean"'):
        mpidist.torch.all_reduce_gradients(model, op="sum" if ranks[0] else "max")
    with pytest.raises(ValueError, match="op must be"):
        mpidist.torch.all_reduce_gradients(model, op="max")
    dist.barrier()


@pytest.mark.parametrize("uses_ddp", [True, False], ids=["ddp", "own_loop"])
def test_sparse_gradients_have_the_weights_of_dense_ones(ranks, uses_ddp):
    import mpidist.torch

    weights = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 3, sparse=is_sparse), torch.nn.Linear(3, 2))
        model[1].sparse = True  # of the user's, who means something else
        model = DistributedDataParallel(model) if uses_ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            if uses_ddp or ranks[0]:  # without DDP, rank 0 has no gradients
                model(torch.tensor([ranks[0], step, 8, 8])).square().sum().backward()
            if not uses_ddp:
                mpidist.torch.all_reduce_gradients(model)
            if ranks[1] > 1 or uses_ddp:
                assert next(iter(model.parameters())).grad.is_sparse == is_sparse
            optimizer.step()
        weights.append([one.detach().clone() for one in model.parameters()])
    for dense, sparse in zip(*weights, strict=True):
        assert torch.allclose(dense, sparse, rtol=1e-5, atol=1e-7)


def test_broadcast_gives_all_ranks_the_state_of_an_optimizer(ranks):
    import mpidist.torch

    rank, size = ranks
    model = model_of(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == size - 1:
        loss_of(model, torch.ones(1, 4)).backward()
        optimizer.step()
    mpidist.torch.broadcast(model, optimizer, root=size - 1)
    states = [None] * size
    dist.all_gather_object(states, (model.state_dict(), optimizer.state_dict()))
    assert all(str(state) == str(states[-1]) for state in states)
    assert states[0][1]["state"]


@pytest.mark.ranks(3)
def test_broadcast_of_a_state_that_one_optimizer_cannot_take_raises_on_all_ranks(ranks):
    """A rank that went on alone would train with another state."""
    import mpidist.torch

    rank, _ = ranks
    model = model_of(rank)
    groups = [list(model.parameters())] if rank != 1 else [[one] for one in model.parameters()]
    optimizer = torch.optim.Adam([{"params": group} for group in groups])
    with pytest.raises(InvalidArgumentError, match=r"rank 1: ValueError: loaded state dict has a different number"):
        mpidist.torch.broadcast(model, optimizer)
    dist.barrier()
