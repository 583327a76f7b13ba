"""GPUs for the ranks of `rolecall run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolecall import config, telemetry
from rolecall.errors import UsageError

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder a GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = config.visible_gpus()
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(number) for number in range(len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0)]


def require(wanted: Mapping[str, int | None]) -> None:
    """Raises UsageError if one of these ranks, by name, wants more GPUs than there are."""
    there = len(visible())
    for rank, count in wanted.items():
        if count and count > there:
            raise UsageError(
                f"{rank}: its role asks for gpus={count}, and {there or 'none'} can be used here; set DEVICE=cpu to "
                f"compute without, or {VISIBLE} to those that there are"
            )


def share(wanted: Sequence[int | None], held: Sequence[str] = ()) -> list[dict[str, str]]:
    """The variable that gives each rank as many GPUs as it wants, each to one rank for as long as there are enough;
    nothing for a rank that wants None, which sees all. Other ranks have those that are `held`."""
    gpus, ranks, shares = visible(), Counter(held), list[dict[str, str]]()
    for count in wanted:
        chosen = sorted(gpus, key=lambda name: ranks[name])[: count or 0]
        ranks.update(chosen)
        shares.append({} if count is None else {VISIBLE: ",".join(chosen)})
    if gpus and ranks.total() > len(gpus):
        telemetry.log().warning("fewer GPUs than the roles ask for", gpus=len(gpus), asked=ranks.total())
    return shares
