"""A small GPT learns the pages of this documentation, letter by letter: DDP over MPI, and checkpoints.

mpidist run -n 4 docs/examples/gpt.py checkpoints 300
mpidist run -n 2 docs/examples/gpt.py checkpoints 600     # goes on, also on another number of ranks
mpidist sbatch --nodes 2 docs/examples/gpt.py checkpoints 9000

A job that is about to be preempted saves, and ends with exit code 75; the next one goes on from there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpidist.torch
from mpidist.checkpoint import Checkpoint, CheckpointManager, PreemptionCheckpointHandler

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])
BATCH, CONTEXT, WIDTH, SAVE_EVERY = 48, 64, 64, 100  # the batch of all ranks, letters, numbers a letter, steps
TEXT = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("*.md")))
LETTERS = sorted({*TEXT})
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, codes):
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        x = self.letter(codes) + self.place(torch.arange(codes.shape[1]))
        return self.output(self.layers(x, mask, is_causal=True))


def train_step(step):
    starts = torch.randint(len(CODES) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    own = starts[dist.get_rank() :: dist.get_world_size()]  # the batches do not depend on the number of ranks
    codes = torch.stack([CODES[start : start + CONTEXT + 1] for start in own.tolist()])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


dist.init_process_group("mpidist")
torch.manual_seed(0)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss = train_step(0)  # also makes the optimizer's state, into which a checkpoint is restored
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    checkpoint = Checkpoint(model=model.state_dict(), optimizer=optimizer.state_dict(), step=1)
manager = CheckpointManager(checkpoint, FOLDER, max_to_keep=2)
if manager.restore_or_initialize():
    optimizer.load_state_dict(checkpoint.optimizer)
handler = PreemptionCheckpointHandler(manager)
while checkpoint.step < STEPS:
    loss = handler.run(train_step, checkpoint.step)
    checkpoint.optimizer = optimizer.state_dict()  # copies numbers, such as a rate that a scheduler changes
    checkpoint.step += 1
    if checkpoint.step % SAVE_EVERY == 0 or checkpoint.step == STEPS:
        manager.save(checkpoint.step)
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {checkpoint.step}: loss {loss:.4f}", flush=True)
strategy.check_equal(model.state_dict(), what="the model")
if dist.get_rank() == 0:
    codes = CODES[:CONTEXT][None]
    for _ in range(80):
        chances = model.module(codes[:, -CONTEXT:])[0, -1].softmax(0)
        codes = torch.cat([codes, torch.multinomial(chances, 1)[None]], 1)
    print("".join(LETTERS[code] for code in codes[0, CONTEXT:]))
strategy.close()
dist.destroy_process_group()
