"""What a sink that takes no point back keeps between processes: its run's id, the newest step of each curve, and how
many rows it was given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "rolecall.json"


@dataclass
class State:
    """The contents of the file in `folder`."""

    run: str = ""
    last: dict[str, int] = field(default_factory=dict)
    rows: int = 0


def read(folder: Path) -> State:
    """The last `write`, or nothing where there is none, or a damaged one. Raises OSError."""
    try:
        content = json.loads((folder / FILE).read_text())
        last = {str(name): int(step) for name, step in content["last"].items()}
        return State(str(content["run"]), last, int(content["rows"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return State()


def write(folder: Path, state: State) -> None:
    """Writes the file, or leaves it as it was. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.tmp"
    temporary.write_text(json.dumps(asdict(state)))
    temporary.replace(folder / FILE)
