"""The tables of docs/settings.md and docs/metrics.md, made from the code. `make docs` writes them; a test compares."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from rolecall.__main__ import main
from rolecall.job import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADS = {
    "config": """# Settings

Every variable that a rank understands. `python -m rolecall config [JOB]` prints the same. A wrong value ends the process
with one line and exit code 2; a name that looks misspelt is warned about. Written by `make docs`.
""",
    "metrics": """# Metrics

What each rank serves at `/metrics` on METRICS_PORT. A gauge of a worker appears once it has a value. Written by
`make docs`.
""",
}
FILES = {"config": DOCS / "settings.md", "metrics": DOCS / "metrics.md"}


def table(command: str, job: str) -> list[str]:
    """The lines of `python -m rolecall COMMAND JOB --markdown`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([command, *([job] if job else []), "--markdown"]) == 0
    return out.getvalue().splitlines()


def page(command: str) -> str:
    """A whole page: what all jobs share, then what each adds."""
    shared = table(command, "")
    parts = [HEADS[command], "## Every job\n", "\n".join(shared) + "\n"]
    for job in registry.JOBS:
        own = [line for line in table(command, job) if line not in shared]
        parts += [f"## `{job}`\n", "\n".join([*shared[:2], *own]) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    for command, file in FILES.items():
        file.write_text(page(command))
