"""What `rolecall new` writes: a job that is one, and a compose file that parses. Its manifests: tests/contracts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from rolecall import __main__, new
from rolecall.declare import describe
from rolecall.errors import USAGE, UsageError


@pytest.mark.parametrize("name", ["blocks", "two_words"])
def test_it_writes_a_job_its_test_and_its_deployment(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name for file in new.write(name, tmp_path)}
    assert files == {f"{name}.py", f"test_{name}.py", "compose.yaml", "kustomization.yaml", "names.yaml", "ranks.yaml"}
    # in this process, which has imported torch: that a child says the same, tests/declare/test_describe.py sees
    monkeypatch.setattr(sys, "path", sys.path.copy())
    job = describe.describe(str(tmp_path / name / f"{name}.py"), ["--workers", "3"])
    sys.modules.pop(name)
    assert (job.name, job.ranks, [role.elastic for role in job.roles]) == (name, 4, [False, True])
    services = yaml.safe_load((tmp_path / name / "compose.yaml").read_text())["services"]
    assert {service["environment"]["ROLE"] for service in services.values()} == {role.name for role in job.roles}
    assert {service["environment"]["JOB"] for service in services.values()} == {f"/job/{name}.py"}
    assert all(service["read_only"] and service["cap_drop"] == ["ALL"] for service in services.values())


@pytest.mark.parametrize("name", ["Upper", "2nd", "a-b", "", "class", "queue", "rl", "../up"])
def test_a_name_that_no_job_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        new.write(name, tmp_path / "inside")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["new", "blocks"]) == 0
    assert "rolecall run blocks/blocks.py" in capsys.readouterr().out
    (tmp_path / "blocks" / "blocks.py").write_text("mine")
    assert __main__.main(["new", "blocks"]) == USAGE
    assert "blocks: exists already" in capsys.readouterr().err
    assert (tmp_path / "blocks" / "blocks.py").read_text() == "mine"
