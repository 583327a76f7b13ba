"""`make push`, and the manifests with the digest that it prints."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import commands
from tests.contracts.containers import ROOT
from tests.contracts.manifests import K8S, extended, rendering
from tools.jobs import Object

NAME = "registry.example/team/rolecall"
DIGESTS = {"cpu": f"sha256:{'a' * 64}", "cuda": f"sha256:{'b' * 64}"}
FOLDERS = sorted({path.parent.name for path in K8S.glob("*/kustomization.yaml")} - {"base", "lost-pods"})
KINDS = {
    kind: [folder for folder in FOLDERS if (re.findall(r"-(cuda|indexed|job)$", folder) or ["plain"])[0] == kind]
    for kind in ("plain", "cuda", "indexed", "job")
}

DOCKER = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/arguments
while [ "$1" != --metadata-file ]; do shift; done
printf '{{"containerimage.digest": "{digest}"}}' > "$2"
"""  # notes its arguments, and answers as buildx


def push(folder: Path, torch: str, image: str = NAME) -> subprocess.CompletedProcess[str]:
    program = commands.stand_in(folder, "docker", script=DOCKER.format(folder=folder, digest=DIGESTS[torch]))
    command = ["make", "--silent", "push", f"IMAGE={image}", f"TORCH={torch}"]
    return commands.run(command, env={**os.environ, **program})


def test_all_platforms_are_pushed_at_once_with_an_sbom(tmp_path: Path) -> None:
    assert push(tmp_path, "cpu").returncode == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--push", "--sbom=true", "linux/amd64,linux/arm64", f"{NAME}:cpu", "BASE=debian:bookworm-slim"} <= {
        *arguments
    }
    # `mode=max` publishes build arguments, and an index's address may contain a password
    assert "--provenance=mode=min" in arguments
    (revision,) = (line for line in arguments if line.startswith("REVISION="))
    assert re.fullmatch(r"REVISION=([0-9a-f]{40}(-dirty)?)?", revision)


def test_an_image_without_a_registry_is_refused(tmp_path: Path) -> None:
    assert push(tmp_path, "cpu", "rolecall").returncode == 2
    assert not (tmp_path / "arguments").exists()


def images(value: Any) -> Iterator[str]:
    """Every image that manifests name."""
    if isinstance(value, dict):
        if isinstance(value.get("image"), str):
            yield value["image"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from images(item)


def named(objects: list[Object]) -> dict[tuple[str, str], list[str]]:
    """Every image that manifests name, by object."""
    return {(item["kind"], item["metadata"]["name"]): list(images(item)) for item in objects}


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_lines_replace_every_image(tmp_path: Path, kind: str) -> None:
    """In the folders of one kind together, whose objects all have names of their own."""
    lines = [*(yaml.safe_load(push(tmp_path, torch).stdout)["images"][0] for torch in ("cuda", "cpu"))]
    (tmp_path / "docker").unlink()
    folders = [os.path.relpath(K8S / folder, tmp_path.resolve()) for folder in KINDS[kind]]
    objects = extended(tmp_path, K8S, resources=folders, images=lines)
    before = {}
    for folder in KINDS[kind]:
        of_folder = named(rendering(folder).objects)
        assert [image for each in of_folder.values() for image in each], folder
        before |= of_folder
    assert len(objects) == sum(len(rendering(folder).objects) for folder in KINDS[kind])
    digests = {f"rolecall:{torch}": digest for torch, digest in DIGESTS.items()}
    assert named(objects) == {name: [f"{NAME}@{digests[image]}" for image in given] for name, given in before.items()}


EXAMPLES = re.findall(
    r"^```yaml\n# \S+/kustomization.yaml\n(.+?)^```$",
    (ROOT / "docs" / "containers.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_pages_examples(tmp_path: Path, text: str) -> None:
    example = yaml.safe_load(text)
    (folder,) = (Path(path).name for path in example.pop("resources"))
    pinned = list(images(extended(tmp_path, K8S / folder, **example)))
    assert pinned
    assert {image.partition("@")[0] for image in pinned} == {NAME}
    assert {image.partition("@")[2] for image in pinned} == {line["digest"] for line in example["images"]}
