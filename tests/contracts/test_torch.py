"""What Rolecall takes from torch's texts, held against the installed torch: each error that a peer's end, silence or
failure causes is made in real processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from rolecall.watch.local import free_ports

ROOT = Path(__file__).resolve().parents[2]
TAKEN = {
    "a call takes too long": "lost",
    "a peer is killed during a call": "lost",
    "a peer is killed before a call": "lost",
    "a peer is killed before the first call": "lost",  # told by the peer that called it
    "a member never connects": "lost",
    "a member of a group never comes": "lost",
    "a member of a group falls silent": "lost",
    "a member of a group ends": "lost",
    "the store is gone": "lost",
    "a function raises": "remote",
    "a function raises, to all": "remote",
    "nobody has that name": "own",
}


def test_each_of_torchs_errors_is_taken_for_what_it_is() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.contracts.torch_errors", *map(str, free_ports(2))], cwd=ROOT, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {line["name"]: line["taken"] for line in lines} == TAKEN, run.stdout + run.stderr
    assert set(Counter(line["name"] for line in lines).values()) == {1}
    texts = {line["name"]: line["text"] for line in lines}
    assert texts["a function raises"].startswith("observer_")
    assert "raised KeyError('no such thing')" in texts["a function raises"]
    assert "torch/distributed/rpc" not in texts["a function raises"]


def test_the_range_of_torch_ends_where_this_was_tested() -> None:
    dependencies = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (required,) = [one for one in dependencies if one.name == "torch"]
    version = Version(torch.__version__)
    assert version.base_version in required.specifier
    assert f"{version.major}.{version.minor + 1}.0" not in required.specifier
    assert "2.9.9" not in required.specifier  # see pyproject.toml


OPTIMIZERS = """
import sys
import torch
from rolecall.job.eager import lighten

def train(make):
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weights])
    for _ in range(3):
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weights.requires_grad and torch.is_grad_enabled()
    return weights.detach().clone()

class Own(torch.optim.SGD):
    pass

makers = [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: Own(p, lr=0.1), torch.optim.Adam,
          lambda p: torch.optim.Adam(p, fused=True), torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop]
def replicate():
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.ones_(replica.module.weight)
    replica(torch.ones(3, 2)).sum().backward()
    return replica.module.weight.grad.clone()

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
lighten()
light = [train(make) for make in makers] + [replicate()]
print("torch._dynamo" in sys.modules)
import torch._dynamo
usual = [train(make) for make in makers] + [replicate()]
print(torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer")
print(all(map(torch.equal, light, usual)))
compiled = torch.compile(lambda x: 2 * x, backend="eager")
print(compiled(torch.ones(1)).item())
"""


def test_optimizers_and_ddp_do_not_import_the_compiler_and_compute_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", OPTIMIZERS], timeout=60, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["False", "True", "True", "2.0"], run.stderr
