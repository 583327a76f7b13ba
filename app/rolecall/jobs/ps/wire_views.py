"""What each trainer holds of a part, at the server that holds the part."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey
from rolecall.jobs.ps.wire import View


class Views:
    """The views of one part. Trainers that were always answered together share one, and its difference is encoded
    once. Where they part, each group has its own.
    """

    def __init__(self, settings: PsSettings) -> None:
        self._settings = settings
        self._views: dict[str, View] = {}  # by trainer

    def __len__(self) -> int:
        return len(set(map(id, self._views.values())))

    def encode(self, parameters: Tensor, keys: Iterable[GradientKey]) -> dict[GradientKey, Tensor]:
        """What those who wait under `keys` are sent of `parameters` [size]: for gradient 0 all of it in float32, then
        the difference. A trainer that waits twice gets it with the first, one that was dropped gets nothing.
        """
        new: list[GradientKey] = []
        groups: dict[int, list[GradientKey]] = {}
        answered = set[str]()
        for key in sorted(keys, key=lambda key: key.number):
            if key.number == 0:
                new.append(key)
            elif key.trainer in self._views and key.trainer not in answered:
                groups.setdefault(id(self._views[key.trainer]), []).append(key)
            answered.add(key.trainer)
        payloads: dict[GradientKey, Tensor] = {}
        for group in groups.values():
            view, names = self._views[group[0].trainer], {key.trainer for key in group}
            if any(one is view and name not in names for name, one in self._views.items()):
                view = view.copy()
            payloads |= dict.fromkeys(group, view.encode(parameters))
            self._views |= dict.fromkeys(names, view)
        if new:
            payloads |= dict.fromkeys(new, parameters.clone())
            self._views |= dict.fromkeys((key.trainer for key in new), View(parameters, self._settings))
        return payloads

    def drop(self, trainers: Collection[str]) -> None:
        """Drops what was kept for lost trainers."""
        self._views = {name: view for name, view in self._views.items() if name not in trainers}
