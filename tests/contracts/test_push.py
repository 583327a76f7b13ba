"""`make push` and `make sbom` with a stand-in for docker, and the manifests with the digest that they print."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.contracts.containers import ROOT, only
from tests.contracts.jobs import ENDING, ending
from tests.contracts.manifests import K8S, Object, extended, overlay

NAME = "registry.example/team/rolecall"
LABEL = "org.opencontainers.image."
DIGEST = {name: f"sha256:{letter * 64}" for name, letter in (("index", "a"), ("amd64", "b"), ("arm64", "c"))}
BASE = f"sha256:{'d' * 64}"
PUSH: Callable[[], int] = runpy.run_path(str(ROOT / "docker" / "push.py"), run_name="push")["main"]
FOLDERS = sorted(path.parent.name for path in K8S.glob("*/kustomization.yaml") if path.parent.name != "base")
KINDS = {
    kind: [folder for folder in FOLDERS if (re.findall(r"-(cuda|indexed|job)$", folder) or ["plain"])[0] == kind]
    for kind in ("plain", "cuda", "indexed", "job")
}

# in place of docker and oras: notes its arguments, fails where it is told to, and answers as a registry with the image;
# a shell, which starts in a tenth of an interpreter's time
STAND_IN = """#!/bin/sh
{{ printf '%s\\t' "${{0##*/}}" "$@"; echo; }} >>{notes}
case "$*" in
{cases}
export*) exec /bin/cat {files} ;;
esac
"""
# in place of docker/sbom.py, where it is not what a test is about
SBOM = """import pathlib, sys
file = pathlib.Path(sys.argv[2])
file.parent.mkdir(exist_ok=True)
file.touch()
"""
RECORDS = {
    "usr/lib/os-release": "ID=debian\nVERSION_CODENAME=bookworm\n",
    "var/lib/dpkg/status": (
        "Package: libc6\nStatus: install ok installed\nArchitecture: arm64\nSource: glibc (2.36-9)\n"
        "Version: 2.36-9+b1\nDescription: a library\n of functions\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: arm64\nVersion: 1\n\n"
    ),
    "opt/x/site-packages/Some_Thing-1.2.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: Some_Thing\nVersion: 1.2\nLicense-Expression: MIT\n\nProse: none\n"
    ),
    "opt/x/site-packages/long-3.dist-info/METADATA": f"Name: long\nVersion: 3\nLicense: {'word ' * 99}\n\n",
}


@dataclass
class Machine:
    """A copy of what `make push` reads, and a PATH with the stand-ins."""

    folder: Path
    driver: str = "docker"
    platforms: str = "linux/amd64*, linux/arm64"
    containerd: bool = False
    fails: list[str] = field(default_factory=list)
    base: str = ""
    captured: pytest.CaptureFixture[str] | None = None

    def __post_init__(self) -> None:
        for name in ("docker/push.py", "docker/sbom.py", "pyproject.toml", "app/rolecall/config.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.programs.mkdir()
        self.install("docker")
        with tarfile.open(self.folder / "files.tar", "w") as archive:
            for name, text in RECORDS.items():
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))

    @property
    def programs(self) -> Path:
        return self.folder / "programs"

    def install(self, name: str) -> None:
        (self.programs / name).touch(0o755)

    def _prepare(self) -> None:
        """Writes what the stand-ins say and where they fail."""
        image = {"Id": DIGEST["amd64"], "Os": "linux", "Architecture": "arm64", "Config": {"Labels": None}}
        entries = [
            {"digest": DIGEST[name], "platform": {"os": "linux", "architecture": name}} for name in ("amd64", "arm64")
        ]
        answers = {
            "buildx version": "some version",
            "DriverStatus": '[["driver-type","io.containerd.snapshotter.v1"]]' if self.containerd else "[]",
            "buildx inspect": f"Name: it\nDriver: {self.driver}\n\nNodes:\nName: it0\nPlatforms: {self.platforms}",
            f"imagetools inspect {NAME}": json.dumps({"digest": DIGEST["index"], "manifests": entries}),
            "imagetools inspect": json.dumps({"digest": self.base}) if self.base else "",
            "image inspect": json.dumps([image]),
            "create": "container",
        }
        cases = [f"*{shlex.quote(part)}*) exit 1 ;;" for part in self.fails]
        cases += [f"*{shlex.quote(part)}*) printf '%s\\n' {shlex.quote(text)} ;;" for part, text in answers.items()]
        files = {name: shlex.quote(str(self.folder / name)) for name in ("notes", "files.tar")}
        for program in self.programs.iterdir():
            program.write_text(STAND_IN.format(cases="\n".join(cases), notes=files["notes"], files=files["files.tar"]))

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of docker/ as make does."""
        self._prepare()
        return subprocess.run(
            [sys.executable, f"docker/{script}.py", *arguments], cwd=self.folder,
            env={"PATH": str(self.programs), **variables}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def push(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """`run` of the script that pushes; in this process, where `captured` has its output."""
        variables = {"IMAGE": NAME, **variables}
        if self.captured is None:
            return self.run("push", **variables)
        self._prepare()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name in list(os.environ):
                patch.delenv(name)
            for name, value in {"PATH": str(self.programs), **variables}.items():
                patch.setenv(name, value)
            code = PUSH()
        output = self.captured.readouterr()
        return subprocess.CompletedProcess(["push"], code, output.out, output.err)

    @property
    def notes(self) -> list[list[str]]:
        """What was asked of the stand-ins."""
        file = self.folder / "notes"
        return [line.split("\t")[:-1] for line in file.read_text().splitlines()] if file.exists() else []

    def did(self, *words: str) -> list[list[str]]:
        return [note[1:] for note in self.notes if note[1 : 1 + len(words)] == list(words)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Its scripts are processes, as make starts them."""
    return Machine(tmp_path)


@pytest.fixture
def quick(machine: Machine, capfd: pytest.CaptureFixture[str]) -> Machine:
    """It pushes in this process, without a true SBOM."""
    machine.captured = capfd
    (machine.folder / "docker" / "sbom.py").write_text(SBOM)
    return machine


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("rolecall: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def values(command: list[str], option: str) -> dict[str, str]:
    """The pairs NAME=VALUE that follow every `option`."""
    pairs = [command[number + 1] for number, word in enumerate(command) if word == option]
    return dict(pair.split("=", 1) for pair in pairs)


# ---- what is refused before anything is built


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"IMAGE": "rolecall"}, "IMAGE='rolecall': names no repository of a registry"),
        ({"IMAGE": ""}, "IMAGE='': names no repository"),
        ({"IMAGE": f"{NAME}:v7"}, f"IMAGE='{NAME}:v7': names no repository"),
        ({"IMAGE": f"{NAME}@{BASE}"}, "names no repository"),
        ({"IMAGE": "registry.example/Team/rolecall"}, "names no repository"),
        ({"TORCH": "rocm"}, "TORCH='rocm': no such build (cpu, cuda)"),
        ({"TAG": "a b"}, "TAG='a b': is no tag"),
        ({"PLATFORMS": "linux/amd64,linux/arm/v7"}, "PLATFORMS='linux/arm/v7': no such platform (linux/amd64, "),
        ({"SOURCE_DATE_EPOCH": "yesterday"}, "SOURCE_DATE_EPOCH='yesterday': is no number"),
    ],
)  # fmt: skip
def test_wrong_variables_are_refused(quick: Machine, variables: dict[str, str], line: str) -> None:
    assert line in refusal(quick.push(**variables))
    assert not quick.did("buildx", "build")


@pytest.mark.parametrize("name", ["127.0.0.1:5000/team/rolecall", "localhost:5000/rolecall", "team/rolecall", NAME])
def test_names_of_repositories(quick: Machine, name: str) -> None:
    quick.fails = ["buildx version"]
    assert "IMAGE" not in refusal(quick.push(IMAGE=name))


@pytest.mark.parametrize(
    ("fails", "line"),
    [
        ("buildx version", "docker has no plugin buildx"),
        ("info", "Docker's engine cannot be reached"),
        ("buildx inspect", "the selected builder does not start: docker buildx inspect --bootstrap says why"),
    ],
)
def test_what_it_needs(quick: Machine, fails: str, line: str) -> None:
    quick.fails = [fails]
    assert line in refusal(quick.push())
    assert not quick.did("buildx", "build")


def test_docker_is_needed(machine: Machine) -> None:
    (machine.programs / "docker").unlink()
    assert "docker is not installed" in refusal(machine.push())
    assert "docker is not installed" in refusal(machine.run("sbom", "image", "file.json"))


def test_it_says_what_cannot_be_built_here(quick: Machine) -> None:
    quick.platforms = "linux/amd64, linux/386"
    said = refusal(quick.push())
    assert "linux/arm64 cannot be built here: the builder it (docker) builds linux/386, linux/amd64; " in said
    assert "PLATFORMS=linux/amd64 pushes the rest" in said
    assert "QEMU" in said
    assert "pushes the rest" not in refusal(quick.push(PLATFORMS="linux/arm64"))
    assert not quick.did("buildx", "build")
    assert quick.push(PLATFORMS="linux/amd64").returncode == 0


def test_wheels_of_another_platform(quick: Machine) -> None:
    wheels = quick.folder / "docker" / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert "no torch for linux/arm64: make wheels TORCH=cpu PLATFORMS=linux/arm64 adds it" in refusal(quick.push())
    assert not quick.did("buildx", "build")
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl").touch()
    assert quick.push().returncode == 0


# ---- what is built and pushed


def test_the_engine_builds_one_platform_after_another(machine: Machine) -> None:
    done = machine.push()
    assert done.returncode == 0, done.stderr
    steps = [note[1:3] for note in machine.notes if note[1] == "push" or note[2] in ("build", "imagetools")]
    assert [step[1] if step[0] == "buildx" else step[0] for step in steps] == [
        "imagetools", "build", "build", "push", "push", "imagetools", "imagetools",
    ]  # fmt: skip
    built = machine.did("buildx", "build")
    assert [(one[one.index("--platform") + 1], one[one.index("--tag") + 1]) for one in built] == [
        (f"linux/{name}", f"{NAME}:cpu-{name}") for name in ("amd64", "arm64")
    ]
    assert not any(word.startswith(("--sbom", "--provenance")) for one in built for word in one)  # it refuses both
    (create,) = machine.did("buildx", "imagetools", "create")
    assert create[3:] == ["--tag", f"{NAME}:cpu", f"{NAME}:cpu-amd64", f"{NAME}:cpu-arm64"]
    for name in ("amd64", "arm64"):
        assert (machine.folder / f"build/sbom-cpu-{name}.json").exists()
        assert f"build/sbom-cpu-{name}.json is not attached" in done.stdout


@pytest.mark.parametrize(("driver", "containerd"), [("docker-container", False), ("remote", False), ("docker", True)])
def test_a_builder_that_attests_does_all_at_once(quick: Machine, driver: str, containerd: bool) -> None:
    quick.driver, quick.containerd = driver, containerd
    done = quick.push(TAG="v7")
    assert done.returncode == 0, done.stderr
    (build,) = quick.did("buildx", "build")
    assert build[build.index("--platform") + 1] == "linux/amd64,linux/arm64"
    assert build[build.index("--tag") + 1] == f"{NAME}:v7"
    # `mode=max` would publish the address of the index
    assert {"--sbom=true", "--provenance=mode=min", "--push"} <= set(build)
    assert not quick.did("push")
    assert f"imagetools inspect {NAME}@{DIGEST['index']} --format '{{{{json .SBOM}}}}'" in done.stdout


def test_the_labels(quick: Machine) -> None:
    project = quick.folder / "pyproject.toml"
    project.write_text(project.read_text() + '\n[project.urls]\nSource = "https://code.example/rolecall"\n')
    quick.base = BASE
    assert quick.push(SOURCE_DATE_EPOCH="0", TORCH_INDEX="https://packages.example/cpu").returncode == 0
    for build in quick.did("buildx", "build"):
        assert values(build, "--label") == {
            f"{LABEL}created": "1970-01-01T00:00:00Z",
            f"{LABEL}base.name": "debian:bookworm-slim",
            f"{LABEL}base.digest": BASE,
            f"{LABEL}source": "https://code.example/rolecall",
        }
        arguments = values(build, "--build-arg")
        # what the label says is what is built upon
        assert arguments["BASE"] == f"debian:bookworm-slim@{BASE}"
        assert arguments["TORCH"] == "cpu"
        assert arguments["TORCH_INDEX"] == "https://packages.example/cpu"
        assert re.fullmatch(r"\d+\.\d+\.\d+", arguments["VERSION"])
    labels = set(re.findall(rf"{re.escape(LABEL)}([a-z.]+)=", only("LABEL")))
    assert labels == {"title", "description", "licenses", "base.name", "version", "revision"}


def test_a_base_that_no_registry_has(quick: Machine) -> None:
    assert quick.push(BASE="mine:1").returncode == 0
    for build in quick.did("buildx", "build"):
        assert values(build, "--build-arg")["BASE"] == "mine:1"
        assert values(build, "--label")[f"{LABEL}base.name"] == "mine:1"
        assert f"{LABEL}base.digest" not in values(build, "--label")


@pytest.mark.parametrize(
    ("fails", "line", "pushed"),
    [
        ("--platform linux/arm64", "linux/arm64 was not built, and nothing was pushed", 0),
        (f"push {NAME}:cpu-arm64", f"{NAME}:cpu-arm64 was not pushed", 2),
        ("imagetools create", f"{NAME}:cpu was not pushed", 2),
        (f"imagetools inspect {NAME}", "its digest cannot be read", 2),
    ],
)
def test_a_step_that_fails(quick: Machine, fails: str, line: str, pushed: int) -> None:
    quick.fails = [fails]
    done = quick.push()
    assert line in refusal(done)
    assert "kustomization" not in done.stdout
    assert len(quick.did("push")) == pushed


def test_an_image_without_an_sbom_is_not_pushed(machine: Machine) -> None:
    machine.fails = ["image inspect"]
    done = machine.push()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "rolecall: linux/amd64 has no SBOM, and nothing was pushed"
    assert not machine.did("push")


def test_an_attested_build_that_fails(quick: Machine) -> None:
    quick.driver, quick.fails = "docker-container", ["buildx build"]
    assert f"{NAME}:cpu was not pushed" in refusal(quick.push())


def test_the_sbom_is_attached_where_a_client_is_installed(quick: Machine) -> None:
    quick.install("oras")
    done = quick.push()
    assert done.returncode == 0, done.stderr
    assert [note[-2:] for note in quick.notes if note[0] == "oras"] == [
        [f"{NAME}@{DIGEST[name]}", f"build/sbom-cpu-{name}.json:application/vnd.cyclonedx+json"]
        for name in ("amd64", "arm64")
    ]
    quick.fails = ["attach"]
    assert "was not attached, the image was pushed" in refusal(quick.push())


# ---- the SBOM


def test_the_sbom_names_every_package(machine: Machine) -> None:
    done = machine.run("sbom", "image", "build/sbom.json")
    assert done.returncode == 0, done.stderr
    text = (machine.folder / "build/sbom.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    sbom = json.loads(text)
    assert {item["name"]: item["value"] for item in sbom["metadata"]["component"]["properties"]} == {
        "image:id": DIGEST["amd64"],
        "image:platform": "linux/arm64",
    }
    packages = {component["purl"]: component for component in sbom["components"]}
    assert set(packages) == {
        "pkg:deb/debian/libc6@2.36-9%2Bb1?arch=arm64&distro=bookworm&upstream=glibc%402.36-9",
        "pkg:pypi/some-thing@1.2",
        "pkg:pypi/long@3",
    }
    assert packages["pkg:pypi/some-thing@1.2"]["licenses"] == [{"license": {"id": "MIT"}}]
    assert "licenses" not in packages["pkg:pypi/long@3"]
    assert machine.did("rm", "container")


@pytest.mark.parametrize("fails", ["image inspect", "create", "export"])
def test_an_image_that_cannot_be_read(machine: Machine, fails: str) -> None:
    machine.fails = [fails]
    assert "image cannot be read" in refusal(machine.run("sbom", "image", "build/sbom.json"))
    assert not (machine.folder / "build/sbom.json").exists()
    assert bool(machine.did("rm", "container")) == (fails == "export")


def test_an_image_without_records(machine: Machine) -> None:
    with tarfile.open(machine.folder / "files.tar", "w"):
        pass
    assert "image has no records of " in refusal(machine.run("sbom", "image", "build/sbom.json"))


# ---- the manifests with a digest


def printed(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    """The lines for a kustomization."""
    return list(yaml.safe_load(done.stdout.partition("# kustomization.yaml\n")[2])["images"])


def images(value: Any) -> Iterator[str]:
    """Every image that manifests name."""
    if isinstance(value, dict):
        if isinstance(value.get("image"), str):
            yield value["image"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from images(item)


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The lines for the images of both builds of torch."""
    machine = Machine(tmp_path_factory.mktemp("both"))
    machine.driver = "docker-container"  # the fastest way to the lines, which are the same for all
    return printed(machine.push()), printed(machine.push(TORCH="cuda"))


def rendered(folder: str) -> list[Object]:
    return (ending if folder in ENDING else overlay)(folder).objects


def named(objects: list[Object]) -> dict[tuple[str, str], list[str]]:
    """Every image that manifests name, by object."""
    return {(item["kind"], item["metadata"]["name"]): list(images(item)) for item in objects}


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_lines_replace_every_image(
    tmp_path: Path, of_both: tuple[list[dict[str, str]], list[dict[str, str]]], kind: str
) -> None:
    """In the folders of one kind together, whose objects all have names of their own."""
    of_cpu, of_cuda = of_both
    assert of_cpu == [{"name": "rolecall", "newName": NAME, "digest": DIGEST["index"]}]
    of_cuda = [{**line, "digest": BASE} for line in of_cuda]
    folders = [os.path.relpath(K8S / folder, tmp_path.resolve()) for folder in KINDS[kind]]
    objects = extended(tmp_path, K8S, resources=folders, images=[*of_cuda, *of_cpu])
    before = {}
    for folder in KINDS[kind]:
        of_folder = named(rendered(folder))
        assert [image for each in of_folder.values() for image in each], folder
        before |= of_folder
    assert len(objects) == sum(len(rendered(folder)) for folder in KINDS[kind])
    digests = {"rolecall:cpu": DIGEST["index"], "rolecall:cuda": BASE}
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


def test_the_revision_is_a_commit() -> None:
    code = "import sys; sys.path.insert(0, 'docker'); import push; print(push.revision())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", done.stdout.strip())
