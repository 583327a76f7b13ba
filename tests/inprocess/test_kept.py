"""What members keep in rank 0's checkpoints."""

from __future__ import annotations

import contextlib
import runpy
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall import Context, Job, ProgramError, Role, Run, UsageError, remote
from rolecall.checkpoint import kept, shardfile
from rolecall.checkpoint.checkpoint import KEPT, newest_first, pack, read
from rolecall.checkpoint.shardfile import Column
from rolecall.record import rundir
from tests.checkpoint import forged
from tests.inprocess.jobs import Lead, Workers, summary_of

ROOT = Path(__file__).parents[2]


class Keeper:
    """Counts its calls, in a number and in a model that is loaded in place."""

    def __init__(self, context: Context[Workers]) -> None:
        self.context, self.model = context, torch.nn.Linear(1, 1)
        self.begun, self.go = threading.Event(), threading.Event()
        torch.nn.init.zeros_(self.model.weight)
        self.kept = context.keep({"count": 0, "model": self.model})

    @remote
    def add(self) -> tuple[int, float]:
        with self.kept.changing(), torch.no_grad():
            self.kept["count"] += 1
            self.model.weight += 1
            return self.kept["count"], self.model.weight.item()

    @remote
    def hold(self) -> None:
        with self.kept.changing():
            self.begun.set()
            self.go.wait(30)

    @remote
    def holds(self) -> None:
        self.begun.wait(30)

    @remote
    def end_hold(self) -> None:
        self.go.set()

    @remote
    def keep_late(self) -> None:
        self.context.keep({})

    @remote
    def keep_function(self) -> None:
        self.kept["count"] = print


class Code:
    """Runs if it is unpickled."""

    ran = False

    @classmethod
    def run(cls) -> None:
        cls.ran = True

    def __reduce__(self) -> Any:
        return Code.run, ()


def run(lead: Lead, directory: Path, **settings: Any) -> dict[str, Any]:
    begun = Future[Run]()
    roles = [
        Role("lead", lambda context: lead(context, begun.result(60))),
        Role("worker", Keeper, count="workers", minimum=1, backoff=0.1),
    ]
    values = {"checkpoint_dir": directory, "checkpoint_interval": 1000, **settings}
    return dict(summary_of(Job(roles, settings=Workers), begun.set_result, **values)["result"])


def save(context: Context[Any]) -> None:
    context.save()
    context.require_saver().wait(60)


def counts(context: Context[Any]) -> dict[str, int]:
    """The counts of all, once one more."""
    answers = {peer.name: answer for peer, answer in context.call_each(Keeper.add)}
    assert all(number == weight for number, weight in answers.values())
    return {name: number for name, (number, _) in answers.items()}


def on_joined(context: Context[Any]) -> threading.Event:
    """Set once a member joins from now on."""
    joined = threading.Event()
    context.on_joined(lambda _: joined.set())
    return joined


def on_lost(context: Context[Any]) -> threading.Event:
    """Set once a member is lost from now on."""
    lost = threading.Event()
    context.on_lost(lambda _: lost.set())
    return lost


def steps_of(directory: Path) -> dict[str, int]:
    """The steps whose states members have in the newest checkpoint."""
    shards = read(newest_first(directory)[0], "job").shards.get(KEPT, [])
    return {name: int(file.name.split(".")[-2][-10:]) for file in shards for name in file.columns}


def test_members_that_stay_go_back_with_rank_0(tmp_path: Path) -> None:
    begun = list[int]()

    def lead(context: Any, here: Run) -> None:
        context.restore({})
        for step in context.steps(8):
            begun.append(step)
            assert counts(context) == {"worker_0": step, "worker_1": step}
            if (step, context.generation) == (1, 1):
                here.kill("lead_0")  # no checkpoint yet
            if step == 3:
                save(context)
            if (step, context.generation) == (5, 2):
                here.kill("lead_0")

    run(lead, tmp_path)
    assert begun == [1, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]


def test_a_member_that_joins_again_has_its_state_of_the_newest_checkpoint(tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, int]:
        context.restore({})
        for step in context.steps(5):
            counts(context)
            if step == 3:
                save(context)
        joined = on_joined(context)
        here.kill("worker_1")
        assert joined.wait(30)
        return counts(context)

    assert {"worker_0": 6, "worker_1": 4}.items() <= run(lead, tmp_path).items()


def test_who_is_away_or_changes_keeps_its_state_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "CHANGE_SECONDS", 0.1)
    saved = list[dict[str, int]]()

    def lead(context: Any, here: Run) -> dict[str, int]:
        context.restore({})
        for step in context.steps(5):
            counts(context)
            if step == 2:
                lost = on_lost(context)
                here.scale("worker", 1)
                assert lost.wait(30)
            if step == 3:
                held = context.call("worker_0", Keeper.hold)
                context.call("worker_0", Keeper.holds).result()
            save(context)
            saved.append(steps_of(tmp_path))
            if step == 3:
                context.call("worker_0", Keeper.end_hold).result()
                held.result()
        joined = on_joined(context)
        here.scale("worker", 2)
        assert joined.wait(30)
        return counts(context)

    assert {"worker_0": 6, "worker_1": 2}.items() <= run(lead, tmp_path).items()
    assert saved == [{"worker_0": each, "worker_1": 1} for each in (1, 2, 2, 4, 5)]


def test_a_state_that_takes_long_to_pack_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "ORDER_SECONDS", 0.4)
    slow, saved = threading.Event(), list[dict[str, int]]()

    def slow_pack(*args: Any) -> Any:
        if slow.is_set():
            time.sleep(1)
        return pack(*args)

    monkeypatch.setattr(kept, "pack", slow_pack)

    def lead(context: Any, _: Run) -> None:
        context.restore({})
        for _step in context.steps(1):
            counts(context)
            slow.set()
            save(context)
            slow.clear()
            saved.append(steps_of(tmp_path))

    run(lead, tmp_path)
    assert saved == [{"worker_0": 1, "worker_1": 1}]


def test_members_whose_disks_hang_do_not_hold_up_checkpoints_and_can_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "WRITE_SECONDS", 0.1)
    go, begun, parts = threading.Event(), list[int](), kept._KeptShare.parts

    def hang(share: Any, *args: Any) -> Any:
        go.wait(30)
        return parts(share, *args)

    monkeypatch.setattr(kept._KeptShare, "parts", hang)

    def lead(context: Any, here: Run) -> None:
        context.restore({})
        for step in context.steps(4):
            begun.append(counts(context)["worker_0"])
            if context.generation == 1:
                save(context)
                assert steps_of(tmp_path) == {}
                if step == 3:
                    go.set()
                    here.kill("lead_0")

    run(lead, tmp_path)
    assert begun == [1, 2, 3, 1]


def test_a_hurt_state_has_the_checkpoint_before_used(tmp_path: Path) -> None:
    begun = list[int]()

    def lead(context: Any, _: Run) -> None:
        context.restore({})
        for step in context.steps(len(begun) + 2):
            begun.append(step)
            assert counts(context) == {"worker_0": step, "worker_1": step}
            if step == 1:
                save(context)

    run(lead, tmp_path)
    (tmp_path / "DONE").unlink()
    path = next((tmp_path / "shards").glob("*2/context.keep-worker_1.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run(lead, tmp_path)
    assert begun == [1, 2, 2, 3, 4]


def test_code_that_a_state_names_does_not_run(tmp_path: Path) -> None:
    body = torch.frombuffer(bytearray(forged.packed({"state": {"count": Code()}, "about": {}})), dtype=torch.uint8)
    columns = {"worker_0": Column("U8", (len(body),), len(body), 0, 1)}
    folder = tmp_path / "shards" / Path(forged.NAME).stem
    file = shardfile.write("state", columns, [body], lambda *piece: shardfile.write_piece(folder / "state", *piece))
    forged.write(tmp_path, "job", {"state": {KEPT: {}}, "about": {}}, {KEPT: [file.to_json()]})
    with pytest.raises(ProgramError, match=r"worker_0 cannot be loaded: .*Unsupported"):
        run(lambda context, _: {**context.restore({}), **counts(context)}, tmp_path)
    assert not Code.ran


def test_where_it_cannot_be_kept_is_named(tmp_path: Path) -> None:
    def lead(context: Any, _: Run) -> None:
        with pytest.raises(UsageError, match="rank 0's own state"):
            context.keep({})
        context.restore({})
        with pytest.raises(Exception, match="once, in the constructor"):
            context.call("worker_0", Keeper.keep_late).result()
        context.call("worker_0", Keeper.keep_function).result()
        context.save()

    with pytest.raises(UsageError, match=r"worker_0: count is a builtins\.builtin_function_or_method"):
        run(lead, tmp_path)


def test_population_based_training_survives_kills(tmp_path: Path) -> None:
    """examples/pbt.py"""
    pbt, ended = runpy.run_path(str(ROOT / "examples" / "pbt.py")), threading.Event()

    def hurt(here: Run) -> None:
        def kills() -> None:
            while not rundir.saved(tmp_path) and not ended.wait(0.01):
                pass  # a generation that has trained counts
            for name in ("trainer_1", "lead_0", "trainer_2", "lead_0"):
                while not ended.wait(0.2):
                    with contextlib.suppress(UsageError):  # it has no worker now
                        here.kill(name)
                        break

        threading.Thread(target=kills, daemon=True).start()

    settings = {"checkpoint_dir": tmp_path, "checkpoint_interval": 0.1, "trainers": 3, "rounds": 60, "steps": 5}
    summary = summary_of(pbt["JOB"], hurt, **settings)
    ended.set()
    assert summary["result"]["error"] < 0.5
    assert summary["generations"] > 1
