"""What a checkpoint may hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from rolecall.config import UsageError

PLAIN = {type(None), bool, int, float, complex, str, bytes}  # beside tensors
CONTAINERS = {list, tuple, set}
MAPPINGS = {dict, OrderedDict, Counter}


def is_stateful(value: Any) -> bool:
    """Whether `value` gives and takes its state, as torch.distributed.checkpoint's Stateful does."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def require_plain(name: str, value: Any) -> None:
    """Raises UsageError where `value` holds anything that a checkpoint, which loads data and no code, cannot hold."""
    import torch  # rank 0's supervisor, too, reads this module's names

    kind = type(value)
    if kind in PLAIN or kind in (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device):
        return
    if kind in torch.serialization.get_safe_globals():  # torch's own kinds of tensors, and what the job adds
        return
    if kind in CONTAINERS or kind is torch.Size:
        for each in value:
            require_plain(f"{name}[...]", each)
    elif kind in MAPPINGS:
        for key, each in value.items():
            require_plain(f"a key of {name}", key)
            require_plain(f"{name}[{key!r}]", each)
    else:
        raise UsageError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: give it state_dict "
            "and load_state_dict, or save numbers, strings, tensors, and lists and dicts of those"
        )
