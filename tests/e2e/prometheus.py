"""A real Prometheus, of Debian, for tests: its image, and what one asks it."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tests.e2e.containers import DEADLINE, ROOT

IMAGE = "rolecall-test-prometheus"
FILES = ROOT / "docker" / "prometheus"


def build() -> None:
    """Make the image. It holds nothing of the working tree, and comes from the engine's cache after the first time."""
    recipe = (ROOT / "tests" / "e2e" / "prometheus.Dockerfile").read_bytes()
    done = subprocess.run(
        ["docker", "build", "--quiet", "--tag", IMAGE, "-"], input=recipe, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool where the configuration lies."""
    options = ["--network=none", f"--volume={FILES}:/etc/prometheus:ro", "--workdir=/etc/prometheus"]
    return subprocess.run(
        ["docker", "run", "--rm", *options, "--entrypoint=promtool", IMAGE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


class Prometheus:
    """A Prometheus that serves on a port of this machine's loopback."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The answer's data; nothing while it does not serve yet."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as got:
                return json.load(got)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it still starts
                return None
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        except OSError:
            return None

    def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The result of an instant query: (labels, value) of each series, without those that are not a number."""
        found = (self.get("/api/v1/query", query=expr) or {}).get("result", [])
        samples = [(one["metric"], float(one["value"][1])) for one in found]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """The alerts called `name` that are pending or fire."""
        found = self.get("/api/v1/alerts") or {"alerts": []}
        return [one for one in found["alerts"] if one["labels"]["alertname"] == name]

    def targets(self) -> dict[str, str]:
        """The health of each target, by its address."""
        found = self.get("/api/v1/targets") or {"activeTargets": []}
        return {one["labels"]["instance"]: one["health"] for one in found["activeTargets"]}

    def rules(self) -> list[dict[str, Any]]:
        found = self.get("/api/v1/rules") or {"groups": []}
        return [rule for group in found["groups"] for rule in group["rules"]]
