"""What each member of a role needs, as `--role ROLE='cpus=4 memory_mb=8000 gpus=1'` gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from rolecall.declare.describe import Description, Needs
from rolecall.errors import UsageError


def given(job: Description, roles: Sequence[str]) -> Description:
    """`job` with what `roles`, each ROLE=NEEDS, say of some of its roles. Raises UsageError."""
    needs = dict(job.needs)
    for text in roles:
        role, _, words = text.partition("=")
        if role not in needs:
            raise UsageError(f"--role {text}: {job.name} has the roles {', '.join(needs)}")
        needs[role] = _changed(needs[role], words, f"--role {text}")
    return replace(job, needs=needs)


def _changed(needs: Needs, words: str, flag: str) -> Needs:
    problem = UsageError(f"{flag}: must be such as --role ROLE='cpus=0.5 memory_mb=8000 gpus=1'")
    values = dict[str, float]()
    for word in words.split() or [""]:
        name, _, value = word.partition("=")
        try:
            values[name] = float(value) if name == "cpus" else int(value)
        except ValueError:
            raise problem from None
        if name not in Needs.__annotations__ or not (0 < values[name] < 10**9 or (name == "gpus" and not values[name])):
            raise problem
    return Needs(**{**asdict(needs), **values})
