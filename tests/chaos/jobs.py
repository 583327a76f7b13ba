"""What the tool must know of each job: its ranks, what it is trained with, and when its result is right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.checkpoint.checkpoint import Checkpoints, Snapshot
from rolecall.declare import registry
from rolecall.record import rundir
from tests.bits import digest
from tests.chaos.environments import FINISH
from tests.chaos.plan import Shape
from tests.integration.cluster import ROOT
from tests.roles import counter

EVALUATION_DEADLINE = 120.0
RUN_DEADLINE = 3600.0  # of as many steps as hours of events leave time for


@dataclass(frozen=True)
class Soak:
    """A job under the soak. `counts` are its ranks by role, rank 0's first; of the elastic role there are `least` to
    `most`. It must not finish with the settings `hurting`, and must with those that `finishing` makes of the directory
    of checkpoints.

    `judge` is given the checkpoints' directory, rank 0's log of the finish, and the settings that the run was given
    beside these; it says what came out, and whether that is right.
    """

    counts: Mapping[str, int]
    hurting: Mapping[str, str]
    finishing: Callable[[Path], Mapping[str, str]]
    judge: Callable[[Path, str, Mapping[str, str]], tuple[str, bool]]
    least: int = 0
    most: int = 0


def shape(name: str) -> Shape:
    soak = SOAKS[name]
    elastic = next((role.name for role in registry.get(name).roles if role.elastic), "")
    ranks = tuple(f"{role}-{n}" for role, count in soak.counts.items() for n in range(count))
    return Shape(ranks, elastic, soak.least, soak.most)


def environment(name: str, settings: Mapping[str, str], seed: int) -> dict[str, str]:
    """A rank's environment: `settings`, and defaults for the rest, whatever is set where the tool was started."""
    job = registry.get(name)
    known = {field.upper() for field in job.settings.model_fields}
    counts = {counter(role): str(SOAKS[name].counts[role.name]) for role in job.roles if counter(role)}
    inherited = {key: value for key, value in os.environ.items() if key not in known}
    return {**inherited, **counts, "JOB": name, "SEED": str(seed % 2**31), **settings}


def evaluate(name: str, checkpoints: Path, **settings: str) -> dict[str, float]:
    """What `python -m rolecall eval` says of the newest checkpoint. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", "rolecall", "eval", name, "--checkpoint", str(checkpoints), "--json"]
    own = environment(name, settings, 1)
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=EVALUATION_DEADLINE)
    if done.returncode:
        raise RuntimeError(f"eval ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _judge_rl(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    solved = "Solved!" in log
    mean = evaluate("rl", checkpoints, **{**given, **SOLVING})["mean_return"]
    return f"{'solved' if solved else 'NOT solved'}, mean return {mean:.1f}", solved and mean >= 475


def _newest(name: str, checkpoints: Path) -> Snapshot:
    newest = Checkpoints(checkpoints, name).newest()
    assert newest is not None
    return newest


def _judge_ps(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    """With `sync`, the bits of an undisturbed run; in each mode every sample is counted once an epoch."""
    summary = json.loads((checkpoints / rundir.DONE).read_text())
    sums = counted(_newest("ps", checkpoints).state["ledger"], summary)
    text = sums or "every sample once an epoch"
    if given.get("UPDATE_MODE", "sync") == "sync" and given.get("WIRE_DTYPE", "float32") == "float32":
        same, right = _judge_bits("ps", {**PS, **given, "EPOCHS": str(summary["epochs"])}, checkpoints)
        return f"{same}; {text}", right and not sums
    accuracy = evaluate("ps", checkpoints, **given)["accuracy"]
    return f"test accuracy {accuracy:.2%}; {text}", accuracy >= PS_ACCURACY and not sums


def _judge_bits(name: str, settings: Mapping[str, str], checkpoints: Path) -> tuple[str, bool]:
    """Whether the last checkpoint has the weights and optimizers' states that the same training comes to if nothing
    happens to it, bit for bit.
    """
    hurt = _newest(name, checkpoints)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "rolecall", "run", name, "--plain"]
        own = {**environment(name, settings, hurt.about["settings"]["seed"]), "CHECKPOINT_DIR": directory}
        subprocess.run(command, cwd=ROOT, env=own, capture_output=True, timeout=RUN_DEADLINE, check=True)
        undisturbed = _newest(name, Path(directory))
    ours, theirs = digest(hurt), digest(undisturbed)
    text = f"step {hurt.step}, SHA-256 {ours[:12]}, undisturbed step {undisturbed.step}, {theirs[:12]}"
    return text, ours == theirs


def counted(ledger: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What is wrong with the sums of a run of `ps` that is over, of its last checkpoint's ledger and its summary."""
    epochs, samples = ledger["epoch"], ledger["samples"]
    begun = sum(int(ledger[name].count_nonzero()) for name in ("used", "following"))
    if begun:
        return f"samples are used of the epochs after the last, {epochs}"
    expected = {"epochs": epochs, "updates": ledger["version"], "samples": epochs * samples}
    wrong = [f"{name} {summary[name]}, not {value}" for name, value in expected.items() if summary[name] != value]
    return ", ".join(wrong)


def _last_epochs_ps(checkpoints: Path) -> Mapping[str, str]:
    """A few epochs more, at the same rate."""
    epoch = _newest("ps", checkpoints).state["ledger"]["epoch"]
    return {**PS, "EPOCHS": str(epoch + 5)}


def _judge_rnn(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    """The bits of an undisturbed run."""
    epochs = len(_newest("rnn", checkpoints).state["history"])
    return _judge_bits("rnn", {**RNN, **given, "EPOCHS": str(epochs)}, checkpoints)


def _judge_hybrid(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    """The bits of an undisturbed run."""
    epochs = _newest("hybrid", checkpoints).state["epoch"]
    return _judge_bits("hybrid", {**HYBRID, **given, "EPOCHS": str(epochs)}, checkpoints)


def _last_epoch_rnn(checkpoints: Path) -> Mapping[str, str]:
    """To the end of the epoch that it is in."""
    return {**RNN, "EPOCHS": str(len(_newest("rnn", checkpoints).state["history"]) + 1)}


def _last_epoch_hybrid(checkpoints: Path) -> Mapping[str, str]:
    """To the end of the epoch that it is in."""
    return {**HYBRID, "EPOCHS": str(_newest("hybrid", checkpoints).state["epoch"] + 1)}


def _judge_pi(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    """Within a thousandth, which is many standard deviations of a run's hundreds of millions of points."""
    newest = _newest(registry.name_of(PI), checkpoints)
    points = newest.state["points"]
    found = 4 * newest.state["hits"] / points
    return f"pi {found:.4f} by {points:,} points", abs(found - math.pi) < 0.001


def _last_rounds_pi(checkpoints: Path) -> Mapping[str, str]:
    """A hundred more."""
    return {"POINTS": "10000", "ROUNDS": str(_newest(registry.name_of(PI), checkpoints).step + 100)}


def _judge_grpo(checkpoints: Path, log: str, given: Mapping[str, str]) -> tuple[str, bool]:
    """It has reached its goal, and the checkpoint says so, too."""
    found = evaluate(GRPO, checkpoints, **given)["accuracy"]
    return f"accuracy {found:.2%} of {SUMS['GOAL']}", found >= float(SUMS["GOAL"])


CART_POLE = "tests.chaos.environments:EndlessCartPole-v0"
PI = "examples/pi.py"  # a user's own job
GRPO = "examples/grpo.py"
SUMS = {"GOAL": "0.9", "UPDATES": "100000000"}
OFTEN = {"CHECKPOINT_INTERVAL": "1", "REJOIN_INTERVAL": "1"}
SOLVING = {"ENV_ID": CART_POLE, FINISH: "1"}
HYBRID = {"NUM_EMBEDDINGS": "100000", "LR": "0.01", "THREADS": "1"}
# they share this machine's cores, which their addresses do not tell; a schedule would depend on EPOCHS
PS = {"LR": "0.003", "LR_SCHEDULE": "constant", "THREADS": "1"}
PS_ACCURACY = 0.93  # after many epochs, of the modes whose result depends on who comes first
# small, so that an epoch takes seconds
RNN = {"CORPUS_BYTES": "300000", "VOCABULARY": "2000", "LR": "0.001", "THREADS": "1"}
SOAKS = {
    "rl": Soak(
        counts={"agent": 1, "observer": 3},
        hurting={**OFTEN, "ENV_ID": CART_POLE, "MAX_ITERATIONS": "100000000"},
        # observers that act themselves finish sooner: rollouts of 500 steps, under a policy that is good already
        finishing=lambda _: {**SOLVING, "MAX_ITERATIONS": "100000000", "INFERENCE": "observer"},
        judge=_judge_rl,
        least=2,
        most=4,
    ),
    "ps": Soak(
        counts={"ps": 1, "trainer": 3},
        hurting={**OFTEN, **PS, "EPOCHS": "1000000"},
        finishing=_last_epochs_ps,
        judge=_judge_ps,
        least=2,
        most=4,
    ),
    "rnn": Soak(
        counts={"ps": 1, "trainer": 1},
        hurting={**RNN, "EPOCHS": "1000000", "CHECKPOINT_INTERVAL": "1"},
        finishing=_last_epoch_rnn,
        judge=_judge_rnn,
    ),
    "hybrid": Soak(
        counts={"master": 1, "ps": 1, "trainer": 2},
        hurting={**HYBRID, "EPOCHS": "1000000", "CHECKPOINT_INTERVAL": "1"},
        finishing=_last_epoch_hybrid,
        judge=_judge_hybrid,
    ),
    PI: Soak(
        counts={"lead": 1, "sampler": 3},
        hurting={**OFTEN, "POINTS": "10000", "ROUNDS": "100000000"},
        finishing=_last_rounds_pi,
        judge=_judge_pi,
        least=2,
        most=4,
    ),
    GRPO: Soak(
        counts={"learner": 1, "generator": 2, "reward": 2},
        hurting={**OFTEN, **SUMS, "GOAL": "2", "THREADS": "1"},
        finishing=lambda _: SUMS,
        judge=_judge_grpo,
        least=1,
        most=3,
    ),
}
