"""A recurrent network split over ranks: the embedding and the decoder, which grow with the vocabulary, live elsewhere.

The trainer has the LSTM. A server has the embedding, the last server the decoder: the same one in a world of two. The
trainer sees them as one model: it calls through RRefs, and one distributed backward pass goes through all ranks. What
to learn from it:

- an `nn.Module` on another rank is made, called, saved and restored through its RRef;
- DistributedOptimizer takes the parameters of all ranks as RRefs, and updates each where it lives;
- only what flows between the parts travels: numbers of characters, their vectors, hidden states and gradients.

The text is this file. `python rnn.py` runs three ranks on this machine. With CHECKPOINT_DIR set, an interrupted
training continues.
"""

import os
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer

STEPS = int(os.environ.get("STEPS", "300"))
FOLDER = os.environ.get("CHECKPOINT_DIR")
VOCABULARY, SIZE, STREAMS, LENGTH = 128, 64, 8, 32


def parameters_of(module):
    """Runs where the module lives: references to its parameters."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class Model(nn.Module):
    """Embedding, LSTM and decoder; only the LSTM is here."""

    def __init__(self, first, last):
        super().__init__()
        self.embedding = rpc.remote(first, nn.Embedding, (VOCABULARY, SIZE))
        self.lstm = nn.LSTM(SIZE, SIZE)
        self.decoder = rpc.remote(last, nn.Linear, (SIZE, VOCABULARY))

    def forward(self, characters, hidden):
        """Logits of the next characters, and the state after them."""
        vectors = self.embedding.rpc_sync().forward(characters)
        output, hidden = self.lstm(vectors, hidden)
        return self.decoder.rpc_sync().forward(output), hidden

    def parameter_rrefs(self):
        """References to all parameters, those of other ranks too."""
        remote = [rpc.rpc_sync(part.owner(), parameters_of, (part,)) for part in (self.embedding, self.decoder)]
        return [*map(rpc.RRef, self.lstm.parameters()), *remote[0], *remote[1]]

    def save(self, step):
        """Writes a checkpoint of all parts; under another name first, so that it is never half written."""
        if FOLDER:
            state = {"lstm": self.lstm.state_dict(), "embedding": self.embedding.rpc_sync().state_dict(),
                     "decoder": self.decoder.rpc_sync().state_dict(), "step": step}  # fmt: skip
            torch.save(state, Path(FOLDER, "rnn.new"))
            Path(FOLDER, "rnn.new").replace(Path(FOLDER, "rnn.pt"))

    def load(self):
        """Continues from the checkpoint, if there is one. Returns its step."""
        if not FOLDER or not Path(FOLDER, "rnn.pt").exists():
            return 0
        state = torch.load(Path(FOLDER, "rnn.pt"), weights_only=True)
        self.lstm.load_state_dict(state["lstm"])
        self.embedding.rpc_sync().load_state_dict(state["embedding"])
        self.decoder.rpc_sync().load_state_dict(state["decoder"])
        print(f"resumed at step {state['step']}")
        return int(state["step"])


def batches():
    """The text as parallel streams, cut into pieces: characters and their successors, both of (LENGTH, STREAMS)."""
    text = torch.tensor([min(code, VOCABULARY - 1) for code in Path(__file__).read_bytes()])
    streams = text[: len(text) // STREAMS * STREAMS].view(STREAMS, -1).t()
    return [(streams[at : at + LENGTH], streams[at + 1 : at + LENGTH + 1])
            for at in range(0, len(streams) - LENGTH, LENGTH)]  # fmt: skip


def train(first, last):
    """Runs on the trainer."""
    model = Model(first, last)
    step, data, hidden = model.load(), batches(), None
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=2.0)
    while step < STEPS:
        characters, targets = data[step % len(data)]
        if step % len(data) == 0:
            hidden = None  # the text begins again
        with dist_autograd.context() as context:
            logits, hidden = model(characters, hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        hidden = tuple(state.detach() for state in hidden)
        step += 1
        if step % 20 == 0 or step == STEPS:
            model.save(step)
            print(f"step {step}  loss {loss.item():.3f}")
    print("done")


def run_worker(rank, world_size):
    """One rank. Servers only serve calls, until `rpc.shutdown`, which waits for all ranks."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    torch.manual_seed(rank)
    rpc.init_rpc(f"server{rank}" if rank else "trainer", rank=rank, world_size=world_size)
    if rank == 0:
        train("server1", f"server{world_size - 1}")
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3)
