"""The page of a real run: its state over HTTP, in a real browser, by buttons, and after the end."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.integration import browser
from tests.integration.browser import is_too_wide
from tests.integration.cluster import DEADLINE, TOKEN, Cluster, Rank, until

MakeCluster = Callable[..., Cluster]
QUICK_ID = "tests.integration.environments:Quick-v0"


def state_of(rank: Rank) -> dict[str, Any]:
    status, text = rank.get("/page/state")
    return json.loads(text) if status == 200 else {}


def events_of(rank: Rank) -> Iterator[dict[str, Any]]:
    """The events of a rank's page, each with what has changed."""
    connection = http.client.HTTPConnection("127.0.0.1", int(rank.environment["METRICS_PORT"]), timeout=DEADLINE)
    try:
        connection.request("GET", "/page/events")
        response = connection.getresponse()
        assert response.status == 200
        while line := response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def url_of(rank: Rank) -> str:
    return f"http://127.0.0.1:{rank.environment['METRICS_PORT']}/"


def test_the_page_of_a_run_under_way(kept: Cluster) -> None:
    agent = kept.agent
    stream = events_of(agent)
    first = next(stream)
    assert (first["live"], first["state"], first["job"]["job"]) == (True, "running", "rl")
    assert {rank["name"] for rank in first["ranks"]} == {"agent_0", "observer_0", "observer_1"}
    assert next(event["step"] for event in stream if event.get("step", 0) > first["step"])
    links = next(event["links"] for event in stream if any(link["calls"] for link in event.get("links", ())))
    act = {link["method"]: link for link in links}["act"]
    assert (act["caller"], act["callees"]) == ("observer", ["agent"])
    assert 0 < act["p50"] <= act["p99"]
    ranks = next(
        ranks
        for event in stream
        for ranks in [event.get("ranks", ())]
        if any(rank.get("calls_per_second") for rank in ranks)
    )
    assert all(rank["health"] == "good" and rank["worker_bytes"] > 2**20 for rank in ranks)
    stream.close()
    one = state_of(agent)
    assert one["curve"]["score"]
    assert one["settings"]["ENV_ID"] == kept.settings["ENV_ID"]
    page = agent.get("/")[1]
    assert TOKEN not in page
    assert TOKEN not in json.dumps(one)
    status, text = kept.observer(0).get("/")
    assert (status, text.count("\n")) == (404, 1)
    assert "METRICS_PORT of agent_0" in text


def test_a_browser_shows_it_and_drains_it(cluster: MakeCluster) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.5").start(2)
    job.is_whole()
    with browser.started() as chromium:
        page = chromium.open(url_of(job.agent))
        page.wait_for_selector("#map .rank.good >> nth=2")
        assert page.title() == "rl: running - Rolecall"
        step = page.inner_text("#facts dd >> nth=0")
        page.wait_for_function("step => document.querySelector('#facts dd').textContent !== step", arg=step)
        page.wait_for_selector("#links td >> text=/observer → agent/")
        page.wait_for_selector("#queues td >> text=/policy/")
        page.wait_for_selector("#curve svg path")
        assert page.get_attribute("#curve svg", "aria-label").startswith("return ")
        assert not page.query_selector("#drain")

        job.observer(1).kill_worker()
        page.wait_for_selector("#errors li >> text=/observer_1.*worker ended/")
        page.wait_for_selector("#line li >> text=/lost a rank|ended: (killed|unreachable)/")

        colours = []
        for dark in (False, True):
            narrow = chromium.open(url_of(job.agent), width=360, dark=dark)
            narrow.wait_for_selector("#map .rank >> nth=2")
            narrow.click("#settings summary")
            assert not is_too_wide(narrow)
            colours.append(narrow.evaluate("getComputedStyle(document.body).backgroundColor"))
            narrow.close()
        assert colours[0] != colours[1]
        assert chromium.complaints == []

        page.fill("#token", "not-the-token-of-this-job")
        page.keyboard.press("Enter")
        page.wait_for_selector("#outcome >> text=/JOB_TOKEN does not match/")
        assert page.input_value("#token") == ""
        assert "403" in chromium.complaints.pop()  # the browser's own line of a refusal
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("#drain")
        assert TOKEN not in page.content()
        page.click("#map .rank >> nth=1")
        page.click("dialog >> text=Take its stacks")
        page.wait_for_selector("dialog pre >> text=/observer_0/")
        assert "agent_0: running" not in page.inner_text("dialog pre")
        page.keyboard.press("Escape")
        page.click("text=Stacks of all ranks")
        page.wait_for_selector("dialog pre >> text=/agent_0[^]*observer_1[^]*wait/")
        page.keyboard.press("Escape")
        page.click("#drain")
        page.keyboard.press("Tab")  # the question is answered without a mouse
        page.keyboard.press("Enter")
        assert job.agent.wait() == 0
        assert "leaving" in job.agent.text()
        page.wait_for_selector("#connection >> text=/Rank 0 has not answered since/")
        assert not [text for text in chromium.complaints if "Failed to load" not in text and "/page/" not in text]
    summary = json.loads((job.checkpoints / "summary.json").read_text())
    data = re.search(r'id="data">(.*?)</script>', (job.checkpoints / "page.html").read_text(), re.DOTALL)
    assert data
    left = json.loads(data[1])
    assert (left["state"], left["summary"]["steps"]) == ("stopped", summary["steps"])


def test_after_the_end_it_says_how_it_went(cluster: MakeCluster) -> None:
    job = cluster(ENV_ID=QUICK_ID, ON_FINISH="linger", MAX_ITERATIONS="5").start(1)
    until(lambda: state_of(job.agent).get("summary"), "the summary in the page")
    one = state_of(job.agent)
    assert (one["state"], one["live"], one["step"]) == ("finished", True, 5)
    assert one["summary"]["result"]["iterations"] == 5
    with browser.started() as chromium:
        page = chromium.open(url_of(job.agent), width=360)
        page.wait_for_selector("#went >> text=/finished/")
        assert not is_too_wide(page)
        page.close()
        for name, rank in job.ranks.items():
            rank.terminate()
            assert rank.wait() == 0, name
        page = chromium.open((job.checkpoints / "page.html").as_uri(), width=360)
        assert page.inner_text("#state") == "finished"
        assert re.search(r"finished.*5 steps", page.inner_text("#went"), re.DOTALL)
        assert not page.is_visible("#control")
        assert not is_too_wide(page)
        assert chromium.complaints == []
