"""Queries: rank 0 asks by the answers to heartbeats, members reply; who may ask from outside."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.gang.directives import name_of_directive
from rolecall.gang.protocol import Beat, Query
from rolecall.messages.queries import Leave, Question, ReadStacks, ReadStats, StartTrace
from rolecall.observe import ask, targets
from rolecall.rank import endpoints, queries
from rolecall.rank.queries import Queries, Replies, SignedQueries
from rolecall.tunnel.rank0 import REPLY_PATH
from rolecall.tunnel.signatures import DeniedError, SignatureChecker, sign
from tests.ports import free_ports
from tests.rank.test_coordinator import FIRST, first_beat, serving, waits

TOKEN, ANOTHER, BODY = "a token of the job: 12345", "a token of another job: 6789", b'{"what": "stacks"}'


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 30))


async def answer_with(results: dict[str, Any], number: str, result: Any) -> None:
    results[number] = result


# ---- between the coordinator and members


def test_a_waiting_heartbeat_brings_the_query_and_the_reply_arrives(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path) as (lead, post):
            order = await post(first_beat(lead))
            assert order.directive is not None
            known = name_of_directive(FIRST, order.directive)
            waiting = asyncio.create_task(post(Beat(FIRST, 2, since=1, known=known)))
            await waits(lead, waiting, FIRST)
            asked = asyncio.create_task(lead.queries.ask(StartTrace(2.0), timeout=20))
            answer = await waiting
            (query,) = answer.queries
            assert (query.what, query.arguments, query.timeout) == ("trace", {"seconds": 2.0}, 20)
            url = f"http://127.0.0.1:{lead.settings.port}{REPLY_PATH}"
            async with aiohttp.ClientSession() as session:
                for _ in range(2):  # the second is one too many, and does no harm
                    async with session.post(url, json={"number": query.number, "result": {"clock_ns": 7}}) as response:
                        assert response.status == 200
                async with session.post(url, data=b"no json") as response:
                    assert response.status == 400
            (reply,) = (await asked).values()
            assert reply["clock_ns"] == 7
            assert 0 < reply["sent_ns"] < reply["received_ns"] < time.monotonic_ns()
            # answered, it is not sent again
            assert (await post(Beat(FIRST, 3, since=2))).queries == ()

    run(steps())


def test_a_query_whose_answer_was_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "RESEND_SECONDS", 0.05)

    async def steps() -> None:
        woken, sent = [], asyncio.Event()

        def wake(key: tuple[str, int]) -> None:
            woken.extend(here.due(key))
            if len(woken) > 1:
                sent.set()

        here = Queries(lambda: {("ps", 0)}, wake)
        asked = asyncio.create_task(here.ask(ReadStats(), timeout=20))
        await sent.wait()
        assert woken[0] == woken[1]
        asked.cancel()
        await asyncio.wait({asked})
        assert here.due(("ps", 0)) == ()  # nobody waits for it any more

    run(steps())


def test_who_does_not_answer_is_said() -> None:
    async def steps() -> None:
        here = Queries(lambda: {("ps", 0)}, lambda key: None)
        assert await here.ask(ReadStats(), to=[("ps", 0), ("ps", 1)], timeout=0.1) == {
            ("ps", 0): {"error": "did not answer within 0.1 s"},
            ("ps", 1): {"error": "is not in the gang"},
        }

    run(steps())


async def handle(question: Question) -> Any:
    match question:
        case StartTrace(seconds):
            return 2 * seconds
        case ReadStats():
            raise OSError("the disk is gone\nand more")
        case ReadStacks():
            await asyncio.Event().wait()
        case Leave():
            return object()
    return None


def test_a_member_replies_to_each_query_once() -> None:
    async def steps() -> None:
        replies, posted, arrived = Replies(handle), list[tuple[str, Any]](), asyncio.Event()

        async def post(number: str, result: Any) -> None:
            posted.append((number, result))
            if len(posted) == 6:
                arrived.set()

        asked = [
            Query("1", "trace", {"seconds": 4, "of a later version": 1}),
            Query("2", "stats"),
            Query("3", "stacks", timeout=0.1),
            Query("4", "leave"),
            Query("5", "unheard"),
            Query("6", "crashed", {"role": "ps"}),
        ]
        replies.take(asked, post)
        replies.take(asked, post)
        await arrived.wait()
        await replies.close()
        assert dict(posted) == {
            "1": 8.0,
            "2": {"error": "the disk is gone"},
            "3": {"error": "has no reply after 0.1 s"},
            "4": {"error": "no message can hold it: Encoding objects of type object is unsupported"},
            "5": {"error": "cannot read the query 'unheard'; run the same version in every rank"},
            "6": {"error": "cannot read the query 'crashed'; run the same version in every rank"},
        }
        assert len(posted) == 6

    run(steps())


# ---- from outside


def test_a_signed_request_is_let_in_once() -> None:
    now = time.time()
    permission = SignatureChecker(TOKEN, clock=lambda: now)
    header = sign(TOKEN, "POST", "/v1/ask", BODY, now)
    assert TOKEN not in header
    permission.check(header, "POST", "/v1/ask", BODY)
    with pytest.raises(DeniedError, match="was sent before"):
        permission.check(header, "POST", "/v1/ask", BODY)


@pytest.mark.parametrize(
    ("token", "change", "why"),
    [
        ("", {}, "has no JOB_TOKEN"),
        (ANOTHER, {}, "JOB_TOKEN does not match"),
        (TOKEN, {"method": "GET"}, "JOB_TOKEN does not match"),
        (TOKEN, {"path": "/v1/other"}, "JOB_TOKEN does not match"),
        (TOKEN, {"body": b'{"what": "leave"}'}, "JOB_TOKEN does not match"),
        (TOKEN, {"header": ""}, "not signed"),
        (TOKEN, {"header": "Bearer x"}, "not signed"),
    ],
)
def test_a_request_that_is_not_signed_for_what_it_asks_is_refused(token: str, change: dict[str, Any], why: str) -> None:
    request = {"header": sign(TOKEN, "POST", "/v1/ask", BODY), "method": "POST", "path": "/v1/ask", "body": BODY}
    with pytest.raises(DeniedError, match=why):
        SignatureChecker(token).check(**{**request, **change})


async def outside(
    settings: Settings, first: bool, asked: Queries | None, over: Callable[[], bool] = lambda: False
) -> tuple[web.AppRunner, str]:
    served = SignedQueries(settings, first)
    if asked:
        served.start(asked, over)
    app = web.Application()
    app.add_routes(served.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_ports(1)[0]
    await endpoints.listen(runner, "127.0.0.1", port, "METRICS_PORT")
    return runner, f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("token", "first", "started", "problem"),
    [
        (TOKEN, True, True, ""),
        ("", True, True, "the request is not signed"),
        (TOKEN, False, True, "this rank is not rank 0"),
        (TOKEN, True, False, "rank 0 is starting"),
    ],
)
def test_asking_from_outside(
    monkeypatch: pytest.MonkeyPatch, token: str, first: bool, started: bool, problem: str
) -> None:
    monkeypatch.setenv("JOB_TOKEN", token)

    async def steps() -> None:
        def wake(key: tuple[str, int]) -> None:
            for each in here._pending[key].values():
                if not each.replied.done():
                    each.replied.set_result([each.query.what, each.query.arguments])

        here = Queries(lambda: {("ps", 0), ("trainer", 1)}, wake)
        settings = Settings(job="ps", job_token=SecretStr(TOKEN))
        runner, target = await outside(settings, first, here if started else None)
        try:
            if problem:
                with pytest.raises(UsageError, match=problem):
                    await ask.ask(target, "stacks")
            else:
                assert await ask.ask(target, "trace", {"seconds": 3}, to=["trainer_1"]) == {
                    "trainer_1": ["trace", {"seconds": 3.0}]
                }
                for what, arguments in (("unheard", {}), ("trace", {"seconds": 1e9}), ("trace", {"seconds": 0})):
                    with pytest.raises(UsageError, match="no query"):
                        await ask.ask(target, what, arguments)
                assert set(await ask.ask(target, "stacks")) == {"ps_0", "trainer_1"}
        finally:
            await runner.cleanup()

    run(steps())


def test_the_token_of_a_local_run_comes_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JOB_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    run_folder = tmp_path / "run"
    (run_folder / "logs").mkdir(parents=True)
    targets.publish(run_folder, [targets.Address("ps_0", "http://127.0.0.1:7/metrics")], str(file))
    target = targets.parse(str(run_folder))
    assert ask._token(target) == TOKEN
    file.write_text("short")
    assert ask._token(target) == "short"  # the job has judged it
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        ask._token(target)
    (run_folder / targets.RANKS).write_text(json.dumps({"token_file": ""}))
    assert ask._token(target) == ""


def test_what_is_asked_of_a_job_that_is_over_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_TOKEN", TOKEN)

    async def steps() -> None:
        over = asyncio.Event()
        asked = Queries(lambda: {("ps", 0)}, lambda key: over.set())
        settings = Settings(job="ps", job_token=SecretStr(TOKEN))
        runner, target = await outside(settings, True, asked, over.is_set)
        try:
            with pytest.raises(UsageError, match="the job is over"):
                await ask.ask(target, "stacks", timeout=600.0)  # it ends while it is asked
        finally:
            await runner.cleanup()

    run(steps())


def test_a_request_from_before_rank_0_started_is_refused() -> None:
    """Whether it was sent before is not remembered."""
    now = time.time()
    with pytest.raises(DeniedError, match="before rank 0 started"):
        SignatureChecker(TOKEN, clock=lambda: now).check(sign(TOKEN, "POST", "/", BODY, now - 10), "POST", "/", BODY)
    with pytest.raises(DeniedError, match="clocks differ"):
        SignatureChecker(TOKEN).check(sign(TOKEN, "POST", "/", BODY, float("nan")), "POST", "/", BODY)
