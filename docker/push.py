"""Builds the image for several platforms and pushes it as one index: `make push IMAGE=registry.example/team/rolecall`.

A builder that can attest builds all platforms at once and attaches an SBOM and the provenance. The engine's own builder
can do neither: it builds one platform after another, their indexes are joined in the registry, and the SBOMs are files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}  # those that wheels of torch exist for
BASE = "debian:bookworm-slim"
ANSWER = 120.0  # seconds
LABEL = "org.opencontainers.image."
# pyproject.toml's names of addresses, and what labels call them
ADDRESSES = {"homepage": "url", "documentation": "documentation", "source": "source", "repository": "source"}
PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
NAME = re.compile(rf"(?:[A-Za-z0-9.-]+(?::\d+)?|{PART})(?:/{PART})+")
TAG = re.compile(r"\w[\w.-]{0,120}")


class PushError(Exception):
    """What cannot be done, in a line."""


@dataclass(frozen=True)
class Image:
    """What is pushed, and for what."""

    name: str
    torch: str
    tag: str
    platforms: tuple[str, ...]

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tag}"

    def of(self, platform: str) -> str:
        """The reference of one platform's image, which the index refers to."""
        return f"{self.reference}-{platform.partition('/')[2]}"


@dataclass(frozen=True)
class Builder:
    """The builder that buildx has selected."""

    name: str
    driver: str
    platforms: frozenset[str]
    attests: bool


def main() -> int:
    try:
        image = wanted(os.environ)
        builder = selected()
        check(image, builder)
        arguments = build_arguments(image.torch)
        (together if builder.attests else one_by_one)(image, arguments)
        report(image, builder)
    except PushError as error:
        print(f"rolecall: {error}", file=sys.stderr)
        return 2
    return 0


def wanted(variables: Any) -> Image:
    """The image that the variables of `make push` ask for."""
    name, torch = variables.get("IMAGE", ""), variables.get("TORCH") or "cpu"
    if not NAME.fullmatch(name):
        example = "IMAGE=registry.example/team/rolecall (TAG= is its tag)"
        raise PushError(f"IMAGE={name!r}: names no repository of a registry, such as {example}")
    if torch not in ("cpu", "cuda"):
        raise PushError(f"TORCH={torch!r}: no such build (cpu, cuda)")
    tag = variables.get("TAG") or torch
    if not TAG.fullmatch(tag):
        raise PushError(f"TAG={tag!r}: is no tag")
    given = variables.get("PLATFORMS") or ",".join(MACHINES)
    platforms = tuple(dict.fromkeys(given.split(",")))
    if unknown := [platform for platform in platforms if platform not in MACHINES]:
        raise PushError(f"PLATFORMS={','.join(unknown)!r}: no such platform ({', '.join(MACHINES)})")
    return Image(name, torch, tag, platforms)


def selected() -> Builder:
    """The builder that buildx uses; it is started, since only a running one says what it can build."""
    if not shutil.which("docker"):
        raise PushError("docker is not installed")
    if not ask("buildx", "version"):
        raise PushError("docker has no plugin buildx, which builds for several platforms; Docker's packages contain it")
    stores = ask("info", "--format", "{{json .DriverStatus}}")
    if not stores:
        raise PushError("Docker's engine cannot be reached: docker info says why")
    lines = ask("buildx", "inspect", "--bootstrap").splitlines()
    values = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    driver = next((value for name, value in values if name == "Driver"), "")
    listed = ",".join(value for name, value in values if name == "Platforms")
    if not driver or not listed:
        raise PushError("the selected builder does not start: docker buildx inspect --bootstrap says why")
    return Builder(
        next(value for name, value in values if name == "Name"),
        driver,
        frozenset(platform.strip(" *") for platform in listed.split(",")),
        attests=driver != "docker" or "io.containerd.snapshotter" in stores,
    )


def check(image: Image, builder: Builder) -> None:
    """Refuses what would fail only after minutes, or after a part is pushed."""
    missing = [platform for platform in image.platforms if platform not in builder.platforms]
    if missing:
        rest = ",".join(platform for platform in image.platforms if platform not in missing)
        raise PushError(
            f"{', '.join(missing)} cannot be built here: the builder {builder.name} ({builder.driver}) builds "
            f"{', '.join(sorted(builder.platforms))}; QEMU's binfmt handlers or a builder with such a node make it "
            f"possible (docs/containers.md)" + (f"; PLATFORMS={rest} pushes the rest" if rest else "")
        )
    wheels = [path.name for path in Path("docker/wheels").glob("*.whl")]
    for platform in image.platforms:
        if wheels and not any(re.match(rf"torch-.*_{MACHINES[platform]}\.whl$", name) for name in wheels):
            raise PushError(
                f"docker/wheels/ has no torch for {platform}: make wheels TORCH={image.torch} PLATFORMS={platform} "
                f"adds it; with an empty docker/wheels/ the build downloads it"
            )


def build_arguments(torch: str) -> list[str]:
    """buildx's arguments for an image of this tree, whatever its platform."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    base, _, digest = (os.environ.get("BASE") or BASE).partition("@")
    labels = {
        "created": created(),
        "base.name": base,
        **{ADDRESSES[name.lower()]: at for name, at in project.get("urls", {}).items() if name.lower() in ADDRESSES},
    }
    # pinned, so that the label tells what was built upon; an engine may have a base that no registry has
    if digest := digest or manifest(base).get("digest", ""):
        base, labels["base.digest"] = f"{base}@{digest}", digest
    version = re.search(r'^__version__ = "(.*)"', Path("app/rolecall/config.py").read_text(), re.MULTILINE)
    values = {
        "TORCH": torch,
        "TORCH_INDEX": os.environ.get("TORCH_INDEX", ""),
        "VERSION": version.group(1) if version else "",
        "REVISION": revision(),
        "BASE": base,
    }
    arguments = ["--file", "docker/Dockerfile"]
    arguments += [part for name, value in values.items() for part in ("--build-arg", f"{name}={value}")]
    return arguments + [part for name, value in labels.items() for part in ("--label", f"{LABEL}{name}={value}")]


def created() -> str:
    """The time of the build, or the one that a reproducible build is given."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    if seconds and not seconds.isdecimal():
        raise PushError(f"SOURCE_DATE_EPOCH={seconds!r}: is no number of seconds")
    time = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def revision() -> str:
    """The commit, marked where the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def together(image: Image, arguments: list[str]) -> None:
    """Builds and pushes all platforms in one go, with an SBOM and the provenance."""
    names = ("--platform", ",".join(image.platforms), "--tag", image.reference)
    # not `mode=max`, which publishes build arguments: an index's address may contain a password
    if run("buildx", "build", *names, *arguments, "--sbom=true", "--provenance=mode=min", "--push", "."):
        raise PushError(f"{image.reference} was not pushed: the lines above say why")


def one_by_one(image: Image, arguments: list[str]) -> None:
    """Builds each platform in the engine, and pushes when all are built."""
    for platform in image.platforms:
        if run("buildx", "build", "--platform", platform, "--tag", image.of(platform), *arguments, "."):
            raise PushError(f"{platform} was not built, and nothing was pushed: the lines above say why")
        if subprocess.run([sys.executable, "docker/sbom.py", image.of(platform), sbom(image, platform)]).returncode:
            raise PushError(f"{platform} has no SBOM, and nothing was pushed")
    for platform in image.platforms:
        if run("push", image.of(platform)):
            raise PushError(f"{image.of(platform)} was not pushed: the lines above say why")
    if run("buildx", "imagetools", "create", "--tag", image.reference, *map(image.of, image.platforms)):
        raise PushError(f"{image.reference} was not pushed: the lines above say why")


def sbom(image: Image, platform: str) -> str:
    return f"build/sbom-{image.torch}-{platform.partition('/')[2]}.json"


def report(image: Image, builder: Builder) -> None:
    """What is in the registry, and how manifests name it."""
    index = manifest(image.reference)
    if not index:
        look = f"docker buildx imagetools inspect {image.reference}"
        raise PushError(f"{image.reference} was pushed, but its digest cannot be read: {look} says why")
    pushed = {
        "/".join(str(entry["platform"][part]) for part in ("os", "architecture")): str(entry["digest"])
        for entry in index.get("manifests", [])
        if "platform" in entry
    }
    if missing := [platform for platform in image.platforms if platform not in pushed]:
        raise PushError(
            f"{image.reference} in the registry lacks {', '.join(missing)}: something else was pushed meanwhile"
        )
    digest = index["digest"]
    print(f"\npushed {image.reference} for {', '.join(image.platforms)}")
    if builder.attests:
        show = f"docker buildx imagetools inspect {image.name}@{digest} --format '{{{{json .SBOM}}}}'"
        print(f"SBOM and provenance are attached: {show}")
    else:
        for platform in image.platforms:
            attach(f"{image.name}@{pushed[platform]}", sbom(image, platform))
    # the folders with GPUs have images of both builds
    name = "rolecall" if image.torch == "cpu" else f'"rolecall:{image.torch}"'
    print(f"\n# kustomization.yaml\nimages:\n  - {{name: {name}, newName: {image.name}, digest: {digest}}}", flush=True)


def attach(subject: str, file: str) -> None:
    """Attaches an SBOM in the registry, where a client for that is installed."""
    kind = "application/vnd.cyclonedx+json"
    if not shutil.which("oras"):
        print(f"{file} is not attached: this builder cannot, and oras is not installed")
    elif subprocess.run(["oras", "attach", "--artifact-type", kind, subject, f"{file}:{kind}"]).returncode:
        raise PushError(f"{file} was not attached, the image was pushed: the lines above say why")
    else:
        print(f"{file} is attached to {subject}")


def manifest(reference: str) -> dict[str, Any]:
    """The index or manifest that a registry has under a name; empty without one."""
    text = ask("buildx", "imagetools", "inspect", reference, "--format", "{{json .Manifest}}")
    return dict(json.loads(text)) if text else {}


def ask(*arguments: str) -> str:
    """What a docker command prints; nothing if it fails, or takes longer than a registry that answers."""
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def run(*arguments: str) -> int:
    sys.stdout.flush()
    return subprocess.run(["docker", *arguments], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
