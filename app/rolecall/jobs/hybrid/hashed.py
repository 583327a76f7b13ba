"""A table that gives rows to ids that occur again, and evicts rows that are not used or if others need the room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rolecall import Rows, UsageError
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.hashed_ids import Filter, Ids, initial, mix, owners
from rolecall.jobs.hybrid.hashed_map import SlotMap
from rolecall.jobs.hybrid.hashed_saved import columns, sinks
from rolecall.jobs.hybrid.table import Bags, Plan, Table

EVICTION_PARTS = 16  # MAX_ROWS / 16 rows are evicted at once, because finding the oldest reads the steps of all
TTL_SWEEPS = 8  # sweeps of expired rows in TTL steps
MIN_SWEEP_STEPS = 64  # between two sweeps
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class HashedPlan(Plan):
    """The changes of a step: `rows` are the slots of ids that have a row before the step or get one in it.

    First the slots `removed` are freed. Then `new_ids` get `new_slots` with the rows `new_values`. The filter erases
    the new ids, and notes the ids `noted`. `free` are the free slots afterwards, `used` the number of slots that were
    ever used.
    """

    removed: Ids
    freed: Ids  # removed slots without a new id
    new_ids: Ids
    new_slots: Ids
    new_values: Tensor
    noted: Ids
    free: Ids
    used: int
    evictions: dict[str, int]  # by reason


class HashedTable(Table):
    """The rows of the ids of server `ordinal`: `weight` and `squares` [MAX_ROWS, ...] by slot.

    An id gets a row in the second step that looks it up, and the row gets the gradient of that step. Occurrences in one
    step count once; lookups of an evaluation do not count. An id without a row has the value 0. With SIGHTINGS=1 an id
    gets a row in the first step, and before that has the initial values of the row. A row is evicted after TTL steps
    without a lookup; if there is no room, the least recently used rows are evicted.

    The address space of MAX_ROWS is reserved at once; a slot takes memory once it is used.
    """

    def __init__(self, settings: HybridSettings, ordinal: int) -> None:
        """Raises UsageError if there is no memory for MAX_ROWS."""
        try:
            super().__init__(settings, ordinal, settings.max_rows)
            self._clear()
        except (RuntimeError, MemoryError) as error:
            size = f"EMBEDDING_DIM={settings.embedding_dim}, or for FILTER_IDS={settings.filter_ids}"
            raise UsageError(f"MAX_ROWS={settings.max_rows}: no memory for rows of {size}; set less") from error

    def _clear(self) -> None:
        for name in ("_map", "filter", "_ids", "_seen"):
            vars(self).pop(name, None)  # frees the memory before new memory is taken
        self._map, self.filter = SlotMap(most := self.settings.max_rows), Filter(self.settings, self.ordinal)
        # zeros take no memory until they are written
        self._ids, self._seen = np.zeros(most, np.int64), np.zeros(most, np.int64)  # the step; 0: a free slot
        self._free: Ids = np.zeros(0, np.int64)  # slots that were used
        self._used = self._captured = 0  # slots that were ever used; slots in the newest checkpoint
        self._dropped = 0  # rows of a checkpoint without room, not yet in the metric
        self._newest: HashedPlan | None = None  # the plan of the newest step
        self.step = 0

    @property
    def alive(self) -> int:
        """The number of ids that have a row."""
        return self._used - len(self._free)

    def start(self, step: int) -> None:
        """Starts training after `step` steps."""
        self.step = step

    def fill(self, threads: int = 1) -> None:
        """Empties the table: a row is initialized when an id gets it."""
        self._clear()

    # ---- lookups

    def _alive(self, slots: Ids) -> NDArray[np.bool_]:
        """Which of `slots`, -1 for none, have a row that is not expired in the next step."""
        alive = slots >= 0
        if self.settings.ttl:
            alive &= self._seen[slots] + self.settings.ttl > self.step
        return alive

    def forward(self, bags: Bags) -> Tensor:
        """The weighted sums of bags of ids: [bags, width]."""
        ids = bags.rows.cpu().numpy()
        slots = self._map.find(ids)
        alive = self._alive(slots)
        if alive.all():
            return super().forward(Bags(torch.from_numpy(slots).to(bags.rows.device), bags.offsets, bags.weights))
        vectors = super().forward(part(bags, slots, alive))
        if self.settings.sightings == 1:  # the initial values of the rows
            new = part(bags, np.cumsum(~alive) - 1, ~alive)
            rows = torch.from_numpy(initial(ids[~alive], self.settings.embedding_dim, self.settings.seed))
            vectors = vectors + functional.embedding_bag(
                new.rows,
                rows.to(new.rows.device),
                new.offsets,
                mode="sum",
                include_last_offset=True,
                per_sample_weights=new.weights,
            )
        return vectors

    # ---- steps

    def plan(self, lookups: Sequence[Bags]) -> HashedPlan:
        """The plan of the next step, which looks these bags up. Changes nothing."""
        whole = Plan.of(lookups)
        ids = whole.rows.cpu().numpy()
        slots = self._map.find(ids)
        alive = self._alive(slots)
        again = ~alive if self.settings.sightings == 1 else ~alive & self.filter.has(ids)
        noted = ids[~alive & ~again]

        over = slots[(slots >= 0) & ~alive]  # expired, and looked up again
        if (every := self._sweep_every) and (self.step + 1) % every == 0:
            seen = self._seen[: self._used]
            over = np.flatnonzero((seen > 0) & (seen + self.settings.ttl <= self.step))
        available = len(self._free) + len(self._ids) - self._used + len(over)
        oldest = self._oldest(int(again.sum()) - available, np.concatenate([slots[alive], over]))
        room = available + len(oldest)
        if again.sum() > room:  # the step looks up more ids than there is room for
            asked = np.flatnonzero(again)
            again[asked[np.argsort(mix(ids[asked]))[room:]]] = False

        removed = np.concatenate([over, oldest])
        free = np.concatenate([self._free, removed])
        count = int(again.sum())
        reused, used = min(count, len(free)), self._used + max(0, count - len(free))
        new_slots = np.concatenate([free[len(free) - reused :], np.arange(self._used, used)])
        slots[again] = new_slots
        values = torch.from_numpy(initial(ids[again], self.settings.embedding_dim, self.settings.seed))

        kept = torch.from_numpy(alive | again).to(whole.rows.device)
        elements = torch.repeat_interleave(kept, whole.offsets.diff())
        lengths = whole.offsets.diff()[kept]
        return HashedPlan(
            rows=torch.from_numpy(slots[alive | again]).to(whole.rows.device),
            bags=whole.bags[elements],
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            weights=None if whole.weights is None else whole.weights[elements],
            removed=removed,
            freed=free[len(self._free) : len(free) - reused],
            new_ids=ids[again],
            new_slots=new_slots,
            new_values=values.to(whole.rows.device),
            noted=noted,
            free=free[: len(free) - reused],
            used=used,
            evictions={"ttl": len(over), "max_rows": len(oldest)},
        )

    @property
    def _sweep_every(self) -> int:
        return max(MIN_SWEEP_STEPS, self.settings.ttl // TTL_SWEEPS) if self.settings.ttl else 0

    def _oldest(self, needed: int, but: Ids) -> Ids:
        """The slots to evict if `needed` more are needed: a batch of the least recently used, except `but`.

        Among slots of one step the hash of the id decides, so that the result does not depend on the slots.
        """
        if needed <= 0:
            return np.zeros(0, np.int64)
        seen = self._seen[: self._used].copy()
        seen[seen == 0] = NEVER
        seen[but] = NEVER
        count = min(max(needed, len(self._ids) // EVICTION_PARTS), int((seen != NEVER).sum()))
        return first(seen, self._ids[: self._used], count)

    def changing(self, plan: Plan) -> Tensor:
        """The slots of the checkpoint being written that `advance` changes, each once: [slots] int64."""
        assert isinstance(plan, HashedPlan)
        slots = torch.cat([plan.rows.cpu(), torch.from_numpy(plan.freed)])
        return slots[slots < self._captured]

    def advance(self, plan: Plan, gradient: Tensor) -> None:
        """Makes the step of the newest `plan`, with the `gradient` [rows, width] of its rows."""
        assert isinstance(plan, HashedPlan)
        self.step += 1
        self._map.remove(self._ids[plan.removed])
        self._seen[plan.removed] = 0
        self._free, self._used = plan.free, plan.used
        self._seen[plan.rows.cpu().numpy()] = self.step
        self._put(plan.new_ids, plan.new_slots)
        slots = torch.from_numpy(plan.new_slots).to(self.weight.device)
        self.weight.detach()[slots] = plan.new_values
        if len(self.squares):
            self.squares[slots] = 0
        self.filter.erase(plan.new_ids)
        self.filter.note(plan.noted)
        self.update(plan.rows, gradient)
        self._newest = plan

    def _put(self, ids: Ids, slots: Ids) -> None:
        """Gives ids their slots. An id without a place in the map, which is rare, gets no row."""
        placed = self._map.insert(ids, slots)
        self._ids[slots] = ids
        if not placed.all():
            self._seen[slots[~placed]] = 0
            self._free = np.concatenate([self._free, slots[~placed]])

    def count(self, metrics: Any) -> None:
        """Sets the metrics for the newest step."""
        if self._dropped:
            metrics.hybrid_evictions.labels("max_rows").inc(self._dropped)
            self._dropped = 0
        if (plan := self._newest) is not None:
            metrics.hybrid_births.inc(len(plan.new_ids))
            for reason, number in plan.evictions.items():
                metrics.hybrid_evictions.labels(reason).inc(number)
        metrics.hybrid_table_rows.set(self.alive)
        metrics.hybrid_filter_fill.set(self.filter.fill)

    # ---- checkpoints

    def rows(self) -> dict[str, Rows]:
        """The columns of a checkpoint: see `hashed_saved`."""
        self._captured = self._used
        saved = columns(self._tensors(), self._used, self.ordinal, self.settings.servers)
        return {**saved, "filter": self.filter.rows(frozen=True)}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"ids": torch.from_numpy(self._ids), "seen": torch.from_numpy(self._seen)}
        adagrad = {"squares": self.squares} if self.settings.optimizer == "adagrad" else {}
        return {**tensors, **adagrad, "weight": self.weight.detach()}

    def prepare(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Rows]:
        """The targets of the columns of a checkpoint, which keep the rows of this server. Raises UsageError for a
        checkpoint of another kind of table.
        """
        self._clear()  # loading a newer, torn checkpoint may have failed
        rest = {name: shape for name, shape in shapes.items() if name != "filter"}
        targets = sinks(rest, self.ordinal, self.settings.servers, self._tensors(), self._adopt)
        return {**targets, "filter": self.filter.rows(frozen=False)}

    def load(self, columns: dict[str, Any]) -> None:
        """Loads the whole columns of a checkpoint."""
        targets = self.prepare({name: tuple(tensor.shape) for name, tensor in columns.items()})
        for name, tensor in columns.items():
            targets[name].put(tensor, 0, 0, 1)

    def _adopt(self, ids: Ids, seen: Ids) -> Ids:
        """Gives slots to the `ids` [n] of a checkpoint that belong to this server, and evicts the least recently used
        rows if there is too little room. Returns the slots [n], -1 for none.
        """
        mine = owners(ids, self.settings.filter_ids, self.settings.servers) == self.ordinal
        places = np.flatnonzero((seen > 0) & mine)
        if (excess := len(places) + self.alive - len(self._ids)) > 0:
            here = np.flatnonzero(self._seen[: self._used])
            out = first(
                np.concatenate([self._seen[here], seen[places]]), np.concatenate([self._ids[here], ids[places]]), excess
            )
            removed = here[out[out < len(here)]]
            self._map.remove(self._ids[removed])
            self._seen[removed] = 0
            self._free = np.concatenate([self._free, removed])
            places = np.delete(places, out[out >= len(here)] - len(here))
            self._dropped += excess
        reused = min(len(places), len(self._free))
        new = np.arange(self._used, self._used + len(places) - reused)
        slots = np.concatenate([self._free[len(self._free) - reused :], new])
        self._free, self._used = self._free[: len(self._free) - reused], self._used + len(new)
        self._seen[slots] = seen[places]
        self._put(ids[places], slots)
        adopted = np.full(len(ids), -1, np.int64)
        adopted[places] = slots
        return adopted

    def entries(self) -> tuple[Tensor, Tensor]:
        """The ids that have a row [rows] int64 in ascending order, and their rows [rows, width]."""
        slots = np.flatnonzero(self._alive(np.where(self._seen[: self._used] > 0, np.arange(self._used), -1)))
        slots = slots[np.argsort(self._ids[slots])]
        return torch.from_numpy(self._ids[slots]), self.weight.detach()[torch.from_numpy(slots)]


def part(bags: Bags, rows: Ids, mask: NDArray[np.bool_]) -> Bags:
    """The elements of `bags` for which `mask` is set, with `rows` [elements] in place of their rows."""
    device, chosen = bags.rows.device, torch.from_numpy(mask)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)]).to(device)
    weights = None if bags.weights is None else bags.weights[chosen.to(device)]
    return Bags(torch.from_numpy(rows[mask]).to(device), before[bags.offsets], weights)


def first(seen: Ids, ids: Ids, count: int) -> Ids:
    """The indices [count] of the least recently `seen` [n] of `ids` [n]; hashes decide among ids of one step."""
    if not count:
        return np.zeros(0, np.int64)
    last = np.partition(seen, count - 1)[count - 1]  # the newest step among them
    before, equal = np.flatnonzero(seen < last), np.flatnonzero(seen == last)
    return np.concatenate([before, equal[np.argsort(mix(ids[equal]))[: count - len(before)]]])
