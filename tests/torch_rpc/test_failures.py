"""Which of torch's errors mean that a peer is gone; tests/contracts/test_torch.py holds them against torch itself."""

from __future__ import annotations

import pytest

from rolecall import CallTimeoutError, PeerLostError, RemoteError
from rolecall.torch_rpc.failures import is_lost


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerLostError("ps_0 does not answer"), True),
        (CallTimeoutError("ps_0 has not answered"), False),
        (RemoteError("ps_0 raised RuntimeError: originated at tensorpipe"), False),
        (RuntimeError("eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"), True),
        (RuntimeError("RPCErr:1:RPC ran for more than set timeout (4000 ms)"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:598] Connection closed by peer"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("originated at tensorpipe"), False),
    ],
)
def test_a_lost_peer_is_told_by_the_text(error: Exception, lost: bool) -> None:
    assert is_lost(error) == lost
    if not isinstance(error, PeerLostError | CallTimeoutError | RemoteError):  # what a called peer's own call raised
        remote = RemoteError("ps_0 raised it")
        remote.__cause__ = error
        assert is_lost(remote) == lost
