"""Rolecall: fault-tolerant torch.distributed.rpc programs, as processes, containers or pods.

The public API. Names are imported when they are first used: a supervisor has no torch, and a health check little else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolecall.checkpoint.capture import Rows
    from rolecall.checkpoint.logged import LoggedShare
    from rolecall.checkpoint.sharded import Sharded
    from rolecall.checkpoint.shards import Share
    from rolecall.config import Seconds, Settings, __version__
    from rolecall.context.context import Context
    from rolecall.context.gradients import Gradients
    from rolecall.context.queues import Queue
    from rolecall.declare.remote import remote
    from rolecall.declare.spec import Job, Role
    from rolecall.declare.task import Peer
    from rolecall.errors import CallTimeoutError, Drained, PeerLostError, ProgramError, RemoteError, UsageError
    from rolecall.export.exported import Exported
    from rolecall.fields import FromUser, PerRank
    from rolecall.launch.run import Run, run, start
    from rolecall.telemetry import Metric
    from rolecall.torch_rpc.program import Program
    from rolecall.wire.future import Future
    from rolecall.wire.messages import PassKey

__all__ = [
    "CallTimeoutError",
    "Context",
    "Drained",
    "Exported",
    "FromUser",
    "Future",
    "Gradients",
    "Job",
    "LoggedShare",
    "Metric",
    "PassKey",
    "Peer",
    "PeerLostError",
    "PerRank",
    "Program",
    "ProgramError",
    "Queue",
    "RemoteError",
    "Role",
    "Rows",
    "Run",
    "Seconds",
    "Settings",
    "Sharded",
    "Share",
    "UsageError",
    "__version__",
    "remote",
    "run",
    "start",
]

_MODULES = {
    "checkpoint.capture": ("Rows",),
    "checkpoint.logged": ("LoggedShare",),
    "checkpoint.sharded": ("Sharded",),
    "checkpoint.shards": ("Share",),
    "config": ("Seconds", "Settings", "__version__"),
    "context.context": ("Context",),
    "context.gradients": ("Gradients",),
    "context.queues": ("Queue",),
    "declare.remote": ("remote",),
    "declare.spec": ("Job", "Role"),
    "declare.task": ("Peer",),
    "errors": ("CallTimeoutError", "Drained", "PeerLostError", "ProgramError", "RemoteError", "UsageError"),
    "export.exported": ("Exported",),
    "fields": ("FromUser", "PerRank"),
    "launch.run": ("Run", "run", "start"),
    "telemetry": ("Metric",),
    "torch_rpc.program": ("Program",),
    "wire.future": ("Future",),
    "wire.messages": ("PassKey",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"rolecall.{module}"), name)
    raise AttributeError(f"module 'rolecall' has no attribute {name!r}")
