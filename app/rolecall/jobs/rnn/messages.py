"""What the trainer tells the ps of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolecall import UsageError
from rolecall.jobs.rnn.corpus import Vocabulary


@dataclass(frozen=True)
class TextDescription:
    """The text that the trainer has read. An epoch is `steps` steps over its `tokens`, of which `targets` are
    predicted; the validation text has `windows` windows.
    """

    corpus: str
    digest: str
    vocabulary: Vocabulary
    tokens: int
    targets: int
    steps: int
    windows: int

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"digest": self.digest, "vocabulary": list(self.vocabulary.words)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UsageError where `state` is of another text."""
        if state["digest"] != self.digest:
            raise UsageError(
                f"CORPUS={self.corpus}: the data are not those that the newest checkpoint was trained on; restore "
                "them, or set another CHECKPOINT_DIR"
            )
