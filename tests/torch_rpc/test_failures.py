"""How a call fails, from the texts that torch has; tests/contracts/test_torch.py holds them against torch itself."""

from __future__ import annotations

import pytest

from rolecall import CallTimeoutError, PeerLostError, RemoteError, telemetry
from rolecall.context.watchdog import Deadline
from rolecall.declare import loader
from rolecall.torch_rpc import failures
from rolecall.torch_rpc.failures import Answer, failure

DEADLINE = Deadline(4.0, "RPC_TIMEOUT=4")
TRACE = """Traceback (most recent call last):
  File "/venv/torch/distributed/rpc/internal.py", line 209, in _run_function
    result = python_udf.func(*python_udf.args, **python_udf.kwargs)
  File "/home/me/job.py", line 7, in bad
    raise ValueError("bad value")
ValueError: bad value"""
AT = "\n\n\nAt:\n  /venv/torch/distributed/rpc/internal.py(236): _handle_exception\n"
RAISED = ValueError(f"ValueError: On WorkerInfo(id=1, name=worker_0):\nValueError('bad value')\n{TRACE}{AT}")


def of(error: Exception) -> Exception:
    return failure(error, "worker_0", "bad", DEADLINE)


def test_the_headline_of_what_a_peer_raised_is_what_it_raised() -> None:
    try:
        raise of(RAISED)
    except RemoteError as error:
        text = loader.users_traceback(error)
    assert telemetry.cause(text)["cause"] == "rolecall.RemoteError: worker_0 raised ValueError: bad value"
    assert 'File "/home/me/job.py", line 7, in bad' in text
    assert "_handle_exception" not in text
    assert "_run_function" not in text


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("ValueError: bad value", RemoteError),
        ("rolecall.RemoteError: ps_0 raised ValueError: bad value", RemoteError),
        ("rolecall.CallTimeoutError: ps_0 has not answered pull within 4 s (RPC_TIMEOUT=4)", CallTimeoutError),
        ("rolecall.PeerLostError: ps_0 does not answer: eof", PeerLostError),
        ("RuntimeError: eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)", PeerLostError),
    ],
)
def test_a_failure_of_a_peers_own_call_stays_what_it_is(last: str, kind: type[Exception]) -> None:
    error = of(RuntimeError(str(RAISED).replace("ValueError: bad value\n\n", f"{last}\n\n")))
    assert (type(error), str(error)) == (kind, f"worker_0 raised {last}")
    assert failures.is_remote(error)


def test_a_late_answer_names_the_function_and_the_setting() -> None:
    late = RuntimeError("RPCErr:1:RPC ran for more than set timeout (4000 ms) and will now be marked with an error")
    error = of(late)
    assert (type(error), str(error)) == (
        CallTimeoutError,
        "worker_0 has not answered bad within 4 s (RPC_TIMEOUT=4)",
    )
    assert error.__cause__ is late
    assert not failures.is_lost(error)  # its peer is alive


def test_whoever_waits_for_an_answer_gets_its_error() -> None:
    answer, error = Answer(), PeerLostError("worker_0 does not answer: eof")
    answer.fail(error, "lead_0")
    for get in (answer.wait, answer.value):
        with pytest.raises(PeerLostError) as raised:
            get()
        assert raised.value is error


GONE = "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"


@pytest.mark.parametrize(
    ("raised", "lost"),
    [(RuntimeError(GONE), True), (ValueError("bad value"), False), (CallTimeoutError("late"), False)],
)
def test_a_peer_whose_own_call_by_torch_finds_nobody_means_a_loss(raised: Exception, lost: bool) -> None:
    error = RemoteError("trainer_0 raised it")
    error.__cause__ = raised
    assert failures.is_lost(error) == lost
