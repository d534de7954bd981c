"""Trainers that call torch.distributed by themselves: Accelerate and Lightning, over the backend `mpidist`."""

import sys

import pytest
from jobs.faults import run_command
from mpi_session.launch import Launcher

pytestmark = pytest.mark.no_mpi

HEAD = """
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist

torch.manual_seed(0)
x = torch.randn(41, 4)
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
batches = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)  # the last one is shorter

def loss_of(model, x, y):
    return (model(x) - y).square().mean()
"""
ACCELERATE = """
import mpidist.torch
from accelerate import Accelerator

dist.init_process_group("mpidist")
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
for _ in range(10):
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
losses = accelerator.gather_for_metrics(loss.detach()[None])
objects = accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True)
weights = accelerator.gather(model.module.weight.detach())
assert torch.equal(weights, weights[:1].expand(3, 4)), "the ranks have drifted apart"
assert (dist.get_backend(), objects, len(losses)) == ("mpidist", [0, 1, 2], 3)
assert losses.max() < 0.1
print("right")
accelerator.end_training()
"""
LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        FAULT
        loss = loss_of(self.layer, *batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
by_mpidist = DDPStrategy(process_group_backend="mpidist")
trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", devices=3, strategy=by_mpidist, **quiet)
trainer.fit(Module(), batches)
loss = trainer.callback_metrics["loss_epoch"]
everyone = [torch.zeros(()) for _ in range(3)]
dist.all_gather(everyone, loss)
assert (dist.get_backend(), trainer.world_size, len({*map(float, everyone)})) == ("mpidist", 3, 1)
assert loss < 0.1
print("right")
"""


def run(folder, program):
    (folder / "program.py").write_text(HEAD + program)
    command = [*Launcher.find(None).command, "-n", "3", sys.executable, str(folder / "program.py")]
    return run_command(folder, command, 3)


@pytest.mark.parametrize("program", [ACCELERATE, LIGHTNING.replace("FAULT", "")], ids=["accelerate", "lightning"])
def test_trainer_trains_over_the_backend(tmp_path, program):
    ended = run(tmp_path, program)
    assert (ended.status, ended.out.count("right")) == (0, 3), (ended.out, ended.err)


def test_trainer_ends_with_the_rank_that_fails_in_a_step(tmp_path):
    fault = 'if dist.get_rank() == 1 and index == 2: raise OSError("no such batch")'
    ended = run(tmp_path, LIGHTNING.replace("FAULT", fault))
    assert ended.status != 0
    assert "no such batch" in ended.err
    assert "rank 1" in ended.err, ended.err
