"""What each member of a role needs, as `--role ROLE='cpus=4 memory_mb=8000 gpus=1'` gives it; how many may be there."""

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


def require_scalable(job: Description, role: str, count: int) -> None:
    """Raises UsageError if `role` is not elastic, or cannot have `count` members."""
    spec = next((spec for spec in job.roles if spec.name == role), None)
    if spec is None or not spec.elastic:
        elastic = ", ".join(spec.name for spec in job.roles if spec.elastic) or "none"
        raise UsageError(f"{role}: is no elastic role of {job.name}; those are: {elastic}")
    if not spec.minimum <= count <= spec.maximum:
        raise UsageError(f"{role}={count}: the job allows {spec.minimum} to {spec.maximum}")


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
