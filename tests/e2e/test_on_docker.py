"""`rolecall run JOB --on docker`: ranks in containers, and all that they keep here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.launch.containers import LABEL, USER
from tests.e2e.containers import DEADLINE, IMAGE, ROOT, docker, inspect
from tests.integration.cluster import until

COMMAND = [sys.executable, "-P", "-m", "rolecall"]
TOKEN = "a-token-of-more-than-128-bits"
RUN = ["run", str(ROOT / "examples" / "pi.py"), "--on", "docker", "--image", IMAGE, "--plain"]
ENDLESS = ["--rounds", "100000", "--points", "1000", "--log-interval", "1000"]


def containers() -> list[str]:
    return docker("ps", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()


def left() -> list[str]:
    """Containers and networks of all runs."""
    names = docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}").split()
    return names + docker("network", "ls", "--quiet", "--filter", f"label={LABEL}").split()


def command(*words: str, folder: Path) -> str:
    done = subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_a_run_survives_a_kill_drains_and_resumes_with_all_that_it_keeps_here(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    environment = {**os.environ, "JOB_TOKEN": TOKEN, "CHECKPOINT_DIR": "kept"}
    run = subprocess.Popen([*COMMAND, *RUN, *ENDLESS], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    with run:
        try:
            until(lambda: (kept / "history.jsonl").exists() or run.poll() is not None, "a step", DEADLINE)
            shown = {name: inspect(name) for name in containers()}
            assert len(shown) == 3, shown
            assert TOKEN not in json.dumps(shown)
            for each in shown.values():
                assert each["Config"]["User"].partition(":")[0] == str(os.getuid() or USER)
                assert each["HostConfig"]["ReadonlyRootfs"]
                ports = [one["HostIp"] for bound in each["HostConfig"]["PortBindings"].values() for one in bound]
                assert ports == ["127.0.0.1"] * each["Name"].endswith("lead-0")
            assert command("ps", "kept", folder=tmp_path).count(" up") == 3
            command("kill", "kept", "sampler_1", folder=tmp_path)
            command("scale", "kept", "sampler=3", folder=tmp_path)
            until(lambda: len(containers()) == 4, "the killed sampler, and another one", DEADLINE)
        finally:
            run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 130, said
    assert "sampler_1 crashed (SIGKILL), restarting it" in said
    assert not left()
    (first, *_) = sorted(kept.glob("checkpoint-*.pt"), reverse=True)

    quick = ["--rounds", str(int(first.stem.rpartition("-")[2]) + 5), "--points", "1000"]
    assert "finished; " in command(*RUN, *quick, "--checkpoint-dir", "kept", folder=tmp_path)
    summary = json.loads((kept / "summary.json").read_text())
    assert (summary["job"], summary["state"], summary["steps"]) == ("pi", "finished", int(quick[1]))
    assert {path.stat().st_uid for path in kept.rglob("*")} == {os.getuid()}
    assert not left()
