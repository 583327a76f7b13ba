"""Disks are lost, copies are torn, members go and come back, in random order. Rank 0 never goes on from an older
checkpoint while a member holds a newer one, whether it is there or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from rolecall.copies.store import stem_of
from rolecall.errors import UsageError
from tests.copies.members import Members

EVENTS = 40


def held(members: Members) -> set[str]:
    """The intact checkpoints on the disks of members that are there, or that one of those remembers."""
    every = [path for path in members.directory.glob("[abc]/copies/checkpoint-*") if not path.stat().st_mode & 0o100]
    here = [store.directory for store in members.stores.values()]
    remembered = {store.copies_claim(0).known for store in members.stores.values()}
    stems = {f"{stem_of(stem)}.pt" for stem in remembered if stem is not None}
    return {path.name for path in every if path.parent in here or path.name in stems}


def tear(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    path.chmod(0o700)  # marks it, for `held`


@pytest.mark.parametrize("seed", range(20))
def test_nothing_newer_is_passed_over(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    members = Members(tmp_path, "abc", checkpoint_copies=random.choice((1, 2)), rejoin_timeout=0.01)
    step, lost = 0, False  # lost: rank 0's disk, since its worker began
    for _ in range(EVENTS):
        match random.choice(("write", "write", "lose", "again", "again", "leave", "leave", "come", "tear", "wipe")):
            case "write" if not lost:
                step += 1
                members.write(step)
            case "lose":
                members.keeper.close()
                shutil.rmtree(members.disk, ignore_errors=True)
                lost = True
            case "leave" if len(members.stores) > 1:
                name = random.choice([*members.stores])
                del members.stores[name]
                members.keeper.changed(name)
            case "come":
                for name in {*"abc"} - members.stores.keys():
                    members.stores[name] = members.store(name)
                    members.keeper.changed(name)
            case "tear" if copies := sorted(held(members)):
                for path in members.directory.glob(f"[abc]/copies/{copies[-1]}"):
                    tear(path)
            case "wipe":
                name = random.choice("abc")
                shutil.rmtree(members.directory / name, ignore_errors=True)
            case "again":
                members.keeper.close()
                members.begin()
                try:
                    snapshot = members.newest()
                except UsageError:
                    lost = True  # until a member is back
                    continue
                name = snapshot.path.name if snapshot else ""
                assert name >= max(held(members), default="")
                lost, step = False, snapshot.step if snapshot else 0
    members.keeper.close()
