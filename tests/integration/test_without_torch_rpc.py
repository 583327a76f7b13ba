"""Only `script` needs torch's RPC: every other job runs with a torch that was built without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.record import rundir

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.rpc":
            import torch._C
            vars(torch._C).pop("_rpc_init", None)  # by which torch tells
sys.meta_path.insert(0, Without())
"""
JOB = """
import torch
from rolecall import Context, Job, Role, remote
class Stage:
    def __init__(self, context: Context) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
    @remote(grad=True)
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x
def lead(context: Context) -> dict:
    x = torch.ones(2, requires_grad=True)
    with context.gradients():
        context.call(context.peers("stage")[0], Stage.scale, x).result().sum().backward()
    return {"gradient": x.grad.sum().item(), "has_rpc": torch.distributed.rpc.is_available()}
JOB = Job([Role("lead", lead), Role("stage", Stage)])
"""
JOBS = {
    "rl": ["--max-iterations", "1"],
    "ps": ["--update-mode", "autograd", "--epochs", "1"],
    "rnn": ["--corpus-bytes", "20000", "--epochs", "1"],
    "hybrid": ["--epochs", "1"],
    "own.py": [],
}
DEADLINE = 120.0


@pytest.mark.timeout(2 * DEADLINE)  # many processes import torch
def test_jobs_run_with_a_torch_that_has_no_rpc(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "own.py").write_text(JOB)
    paths = [str(tmp_path / "without"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = {
        job: subprocess.Popen(
            [sys.executable, "-m", "rolecall", "run", job, *words, "--plain", "--checkpoint-dir", f"runs-{job}"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job, words in JOBS.items()
    }
    try:
        printed = {job: process.communicate(timeout=DEADLINE)[0] for job, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
    assert {job: printed[job] for job, process in started.items() if process.returncode} == {}
    summary = rundir.read_summary(tmp_path / "runs-own.py")
    assert summary
    assert (summary["result"]["gradient"], summary["result"]["has_rpc"]) == (2.0, False)
