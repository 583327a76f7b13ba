"""What several kinds of tests ask of a job's roles."""

from __future__ import annotations

from rolecall import Role


def counter(role: Role) -> str:
    """The variable that counts a role's members; empty where their number is fixed."""
    return role.count.upper() if isinstance(role.count, str) else ""
