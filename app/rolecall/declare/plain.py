"""Which values a checkpoint can hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from rolecall.errors import UsageError

PLAIN = {type(None), bool, int, float, complex, str, bytes}  # beside tensors
CONTAINERS = {list, tuple, set}
MAPPINGS = {dict, OrderedDict, Counter}


def is_stateful(value: Any) -> bool:
    """Whether `value` gives and takes its state, as torch.distributed.checkpoint's Stateful does."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _is_refused(kind: type) -> bool:
    """Whether no checkpoint, which loads data and no code, holds a value of this type, whatever is in it."""
    if kind in PLAIN or kind in CONTAINERS or kind in MAPPINGS:
        return False
    import torch  # rank 0's supervisor, too, reads this module's names

    tensors = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size)
    return kind not in tensors and kind not in torch.serialization.get_safe_globals()  # and what the job adds


def require_plain(name: str, value: Any) -> None:
    """Raises UsageError if `value` holds anything that a checkpoint cannot hold."""
    kind = type(value)
    if _is_refused(kind):
        advice = (
            "give it state_dict and load_state_dict, or save numbers, strings, tensors, and lists and dicts of those"
        )
        raise UsageError(f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: {advice}")
    if kind in CONTAINERS:
        for each in value:
            require_plain(f"{name}[...]", each)
    elif kind in MAPPINGS:
        for key, each in value.items():
            require_plain(f"a key of {name}", key)
            require_plain(f"{name}[{key!r}]", each)
