"""Limits of torch's RPC, for modules that do not import torch."""

from __future__ import annotations

RPC_THREADS = 16  # of a worker: they serve incoming calls, and receive the answers of its outgoing ones
