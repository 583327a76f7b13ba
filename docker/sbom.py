"""Writes what an image holds as CycloneDX: `python docker/sbom.py IMAGE FILE.json`.

It reads Debian's and Python's own records from the image's files, so that an image of another platform need not run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

try:
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
except ModuleNotFoundError as error:
    print(
        f"rolecall: the SBOM needs the package cyclonedx-python-lib ({error}): make sbom installs it", file=sys.stderr
    )
    sys.exit(2)

Fields = dict[str, str]
DEBIAN = "var/lib/dpkg/status"
SYSTEM = "usr/lib/os-release"
LABEL = "org.opencontainers.image."


def main() -> int:
    if len(sys.argv) != 3:
        return refuse("usage: python docker/sbom.py IMAGE FILE.json")
    image, file = sys.argv[1], Path(sys.argv[2])
    try:
        bom = describe(json.loads(docker("image", "inspect", image))[0], records(image))
    except subprocess.CalledProcessError as error:
        return refuse(f"{image} cannot be read: {(error.stderr or '').strip() or 'there is no such image'}")
    except FileNotFoundError:
        return refuse("docker is not installed")
    if not bom.components:
        return refuse(f"{image} has no records of Debian's or Python's packages")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    print(f"{file}: {len(bom.components)} packages of {image}")
    return 0


def describe(image: dict[str, Any], files: dict[str, str]) -> Bom:
    """The bill of materials of an image, from what `docker image inspect` says of it and the records in it."""
    labels = image["Config"].get("Labels") or {}
    bom = Bom()
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER,
        name=labels.get(f"{LABEL}title") or "image",
        version=labels.get(f"{LABEL}version") or None,
        # the digest of the image's configuration, which the engine and every registry agree on
        properties=[
            Property(name="image:id", value=image["Id"]),
            Property(name="image:platform", value=platform(image)),
        ],
    )
    packages = {component.purl: component for component in [*debian(files), *python(files)]}
    bom.components.update(packages.values())
    bom.register_dependency(bom.metadata.component, packages.values())
    return bom


def platform(image: dict[str, Any]) -> str:
    return f"{image['Os']}/{image['Architecture']}"


def debian(files: dict[str, str]) -> Iterator[Component]:
    """Debian's packages, from dpkg's database."""
    system = dict(line.split("=", 1) for line in files.get(SYSTEM, "").splitlines() if "=" in line)
    for text in files.get(DEBIAN, "").split("\n\n"):
        record = fields(text)
        if not record.get("Status", "").endswith(" installed"):
            continue
        qualifiers = {"arch": record["Architecture"]}
        if codename := system.get("VERSION_CODENAME"):
            qualifiers["distro"] = codename
        # security advisories name the source package
        if source := record.get("Source"):
            name, _, version = source.partition(" ")
            qualifiers["upstream"] = f"{name}@{version.strip('()')}" if version else name
        yield Component(
            type=ComponentType.LIBRARY,
            name=record["Package"],
            version=record["Version"],
            purl=PackageURL("deb", "debian", record["Package"], record["Version"], qualifiers),
        )


def python(files: dict[str, str]) -> Iterator[Component]:
    """Python's packages, from the metadata that installers leave."""
    for path, text in files.items():
        if not path.endswith(".dist-info/METADATA"):
            continue
        record = fields(text)
        name = record["Name"].lower().replace("_", "-").replace(".", "-")
        # older metadata has the licence's whole text here
        stated = record.get("License-Expression") or record.get("License", "")
        licences = [LicenseFactory().make_from_string(stated)] if stated and len(stated) < 80 else []
        yield Component(
            type=ComponentType.LIBRARY,
            name=record["Name"],
            version=record["Version"],
            purl=PackageURL("pypi", None, name, record["Version"]),
            licenses=licences,
        )


def fields(text: str) -> Fields:
    return {name: str(value) for name, value in HeaderParser().parsestr(text).items()}


def records(image: str) -> dict[str, str]:
    """The files of an image that say what is installed, by path."""
    container = docker("create", image).strip()
    try:
        with subprocess.Popen(
            ["docker", "export", container], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as export:
            assert export.stdout is not None
            assert export.stderr is not None
            texts = {}
            # a command that fails writes less, or nothing
            with contextlib.suppress(tarfile.ReadError):
                texts = recorded(export.stdout)
            export.stdout.read()
            said = export.stderr.read().decode()
        if export.returncode:
            raise subprocess.CalledProcessError(export.returncode, export.args, stderr=said)
        return texts
    finally:
        docker("rm", container)


def recorded(stream: Any) -> dict[str, str]:
    """The records in a tar stream of an image's files."""
    texts = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.name in (DEBIAN, SYSTEM) or member.name.endswith(".dist-info/METADATA"):
                content = archive.extractfile(member)
                assert content is not None
                texts[member.name] = content.read().decode(errors="replace")
    return texts


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


def refuse(message: str) -> int:
    print(f"rolecall: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
