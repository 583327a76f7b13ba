"""What `pip install` gives a user: the package of a release in an environment that has only what its metadata names."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rolecall
from rolecall import manifests
from rolecall.declare import registry
from rolecall.errors import USAGE
from tests import commands
from tests.contracts.manifests import K8S
from tests.contracts.test_architecture import the_source
from tests.once import made_once
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "MANIFEST.in")
# imported at the start of each process: notes every file of the repository that the process opens
GUARD = """
import os, sys
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        if path.startswith({root!r} + os.sep) and not path.startswith({packages!r} + os.sep):
            file = os.open({opened!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, path.encode() + b"\\n")
            os.close(file)
sys.addaudithook(note)
"""


# what the core lacks; a job whose extra is missing says how to install it
OF_JOBS = ("gymnasium", "sklearn", "scipy", "torchvision", "joblib")
REFUSED = {
    name: f"JOB={name}: needs {packages[0]}, which is not installed; pip install 'rolecall[{name}]'"
    for name, packages in registry.JOBS.items()
    if packages
}


@dataclass(frozen=True)
class Installed:
    """A virtual environment in `folder`, with the package and what its core depends on."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    @property
    def opened(self) -> list[str]:
        """The files of the repository that a process of this environment has opened."""
        file = self.folder / "opened"
        return file.read_text().splitlines() if file.exists() else []

    def run(self, directory: Path, *command: str, **variables: str) -> str:
        """The output of a command of the environment, which ends well."""
        done = self.end(directory, *command, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self, directory: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """How a command of the environment ends."""
        environment = {"PATH": f"{self.folder / 'bin'}:{os.defpath}", "HOME": str(directory), "LANG": "C.UTF-8"}
        return subprocess.run(
            command,
            cwd=directory,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def jobs(self) -> dict[str, str]:
        """The variable with which a process has the extra `jobs` too."""
        return {"PYTHONPATH": str(self.folder / "jobs")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    dist = made_once(
        tmp_path_factory, "dist", lambda folder: build(folder, tmp_path_factory.mktemp("source") / "rolecall")
    )
    installed = Installed(tmp_path_factory.mktemp("installed"))
    done(sys.executable, "-m", "venv", "--without-pip", str(installed.folder))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(installed.python))
    done(*pip, "install", "--no-deps", "--no-index", "--no-compile", *map(str, dist.glob("*.whl")))
    texts = {"root": str(ROOT), "packages": str(PACKAGES), "opened": str(installed.folder / "opened")}
    (installed.packages / "repository_guard.py").write_text(GUARD.format(**texts))
    link(installed.folder / "dependencies", named(installed.packages))
    link(installed.folder / "jobs", named(installed.packages, "jobs"))
    (installed.packages / "dependencies.pth").write_text(
        f"{installed.folder / 'dependencies'}\nimport repository_guard\n"
    )
    return installed


def link(folder: Path, names: Iterable[str]) -> None:
    """Fills `folder` with links to the modules of the distributions `names`."""
    folder.mkdir()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(distribution.locate_file(top)))


def build(folder: Path, source: Path) -> None:
    """Builds the sdist, and the wheel from it, as a release does, but without a network."""
    shutil.copytree(ROOT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    python = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    done(*python, "--outdir", str(folder), str(source))


def done(*command: str) -> None:
    ended = commands.run(command, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def named(packages: Path, *extras: str) -> Iterator[str]:
    """The distributions that the metadata of the package in `packages` names, with `extras`, and what they need, each
    once."""
    (own,) = importlib.metadata.distributions(path=[str(packages)])
    pending, seen = needs(own, extras), set[str]()
    while pending:
        requirement = pending.pop()
        if (key := f"{requirement.name} {sorted(requirement.extras)}") in seen:
            continue
        seen.add(key)
        found = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), f"{requirement}: {found.version}"
        yield requirement.name
        pending += needs(found, requirement.extras)


def needs(distribution: importlib.metadata.Distribution, extras: Iterable[str]) -> list[Requirement]:
    """What `distribution` with `extras` needs here."""
    each = [Requirement(text) for text in distribution.requires or ()]
    return [one for one in each if not one.marker or any(one.marker.evaluate({"extra": e}) for e in ("", *extras))]


def test_extras_are_what_the_jobs_import_beside_the_core() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: named_by(texts) for name, texts in project["optional-dependencies"].items()}
    assert extras["jobs"] == set[str]().union(*(extras[name] for name in REFUSED))
    providers = {package: named_by(names) for package, names in importlib.metadata.packages_distributions().items()}
    for name, packages in registry.JOBS.items():
        assert extras.get(name, set()) == {each for package in packages for each in providers[package]}, name
    core = named_by(project["dependencies"]) | {"pydantic", "annotated-types"}  # of pydantic-settings
    optional = set[str]().union(*extras.values()) - extras["jobs"]
    for one in the_source().imports:
        package, job = one.module.partition(".")[0], one.importer.removeprefix("rolecall.jobs.").partition(".")[0]
        # of Python 3.14, and of type checkers
        if package not in {"rolecall", "annotationlib", "_typeshed", *sys.stdlib_module_names}:
            assert providers[package] & (core | (extras[job] if job in REFUSED else optional)), one


def named_by(requirements: Iterable[str]) -> set[str]:
    """The names of distributions, as indexes normalise them."""
    return {re.sub(r"[-_.]+", "-", Requirement(text).name).lower() for text in requirements}


@pytest.mark.parametrize(
    ("target", "extras"), [*((f"run-{name}", name) for name in REFUSED), ("lint", "jobs,dev,docs")]
)
def test_make_installs_what_a_target_needs_once(tmp_path: Path, target: str, extras: str) -> None:
    def installs() -> list[str]:
        ended = commands.run(("make", "--dry-run", target, f"VENV={tmp_path}"), cwd=ROOT, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return re.findall(r"--editable '(.*)'", ended.stdout)

    assert installs() == [f".[{extras}]"]
    (tmp_path / f".ready-{target.removeprefix('run-')}").touch()
    (tmp_path / ".ready").touch()
    assert installs() == []


def test_the_package_the_command_and_the_module_are_installed(installed: Installed, tmp_path: Path) -> None:
    where = "import rolecall; print(rolecall.__file__, rolecall.__version__)"
    assert installed.run(tmp_path, "python", "-c", where).split() == [
        str(installed.packages / "rolecall" / "__init__.py"),
        rolecall.__version__,
    ]
    assert installed.run(tmp_path, "rolecall", "--version") == f"rolecall {rolecall.__version__}\n"
    assert installed.run(tmp_path, "python", "-m", "rolecall", "jobs")


def test_every_file_of_the_package_is_installed_and_nothing_else(installed: Installed) -> None:
    (own,) = importlib.metadata.distributions(path=[str(installed.packages)])
    files = {Path(*file.parts) for file in own.files or () if file.suffix != ".pyc"}
    assert {file.parts[0] for file in files} == {"..", "rolecall", f"rolecall-{rolecall.__version__}.dist-info"}
    sources = {path.relative_to(ROOT / "app") for path in (ROOT / "app" / "rolecall").rglob("*.py")}
    assert {file for file in files if file.suffix == ".py"} == sources
    assert Path("rolecall/py.typed") in files
    assert own.metadata["Version"] == rolecall.__version__
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [Requirement(text) for text in own.requires or () if "extra ==" not in text] == list(
        map(Requirement, wanted)
    )


def test_the_readmes_program_runs_without_the_repository(installed: Installed, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "pi.py").write_text(program)
    out = installed.run(tmp_path, "rolecall", "run", "pi.py", "--plain", "--rounds", "3", "--points", "1000")
    assert "pi" in out
    assert installed.opened == []


def test_uv_runs_what_rolecall_new_writes(
    installed: Installed, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By its header, in an empty folder. The wheel names no dependencies, which are links here."""
    (wheel,) = made_once(tmp_path_factory, "dist", lambda folder: None).glob("*.whl")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(tmp_path / wheel.name, "w") as bare:
        for name in full.namelist():
            content = full.read(name)
            if name.endswith("/METADATA"):
                content = re.sub(rb"Requires-Dist:.*\n", b"", content)
            if name.endswith("/RECORD"):
                content = re.sub(rb"(?m)(/METADATA),.*", rb"\1,,", content)
            bare.writestr(name, content)
    installed.run(tmp_path, "rolecall", "new", "fresh_job")
    paths = {"UV_CACHE_DIR": str(tmp_path / "uv"), "PYTHONPATH": str(installed.folder / "dependencies")}
    options = ("--offline", "--no-index", "--find-links", str(tmp_path), "--python", os.path.realpath(sys.executable))
    ended = commands.run(
        [
            Path(sys.executable).with_name("uv"),
            "run",
            *options,
            "fresh_job.py",
            "--rounds",
            "3",
            "--checkpoint-dir",
            "kept",
        ],
        cwd=tmp_path / "fresh_job",
        env={**os.environ, **paths},
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "fresh_job" / "kept" / "summary.json").exists()


def test_the_core_describes_every_job_and_refuses_to_run_those_whose_extra_is_missing(
    installed: Installed, tmp_path: Path
) -> None:
    """It says the command that installs the extra, and starts nothing."""
    saved = ["rl", "--checkpoint", "checkpoint-1.pt"]
    refused = [*(["run", job] for job in REFUSED), ["eval", *saved], ["export", "--format", "torch", *saved]]
    listed = [["jobs"], ["completion", "bash"], ["metrics"]]
    listed += [[command, job] for job in REFUSED for command in ("config", "metrics", "describe")]
    code = f"""
import importlib.util
from rolecall.__main__ import main
assert not [name for name in {OF_JOBS} if importlib.util.find_spec(name)]
for words in {listed}:
    assert main(words) == 0, words
for words in {refused}:
    assert main(words) == {USAGE}, words
"""
    ended = installed.end(tmp_path, "python", "-c", code)
    said = [*REFUSED.values(), REFUSED["rl"], REFUSED["rl"]]
    assert (ended.returncode, ended.stderr.splitlines()) == (0, [f"rolecall: {one}" for one in said])
    assert all(name in ended.stdout for name in registry.JOBS)
    assert not list(tmp_path.iterdir())


def test_a_rank_whose_extra_is_missing(installed: Installed, tmp_path: Path) -> None:
    port, metrics = map(str, free_ports(2))
    rank = {"JOB": "rl", "ROLE": "agent", "TLS": "off", "PORT": port, "METRICS_PORT": metrics}
    ended = installed.end(tmp_path, "rolecall", "rank", **rank)
    assert ended.returncode == USAGE
    assert ended.stderr.splitlines()[-1] == f"rolecall: {REFUSED['rl']}"
    doctor = installed.end(tmp_path, "rolecall", "doctor", **rank)
    assert doctor.returncode == USAGE
    assert f"problem      packages              {REFUSED['rl']} -> " in doctor.stdout


def test_a_built_in_job_runs_without_the_repository(installed: Installed, tmp_path: Path) -> None:
    flags = ("--observers", "1", "--max-iterations", "2", "--num-envs", "2", "--rollout-steps", "8")
    installed.run(tmp_path, "rolecall", "run", "rl", "--plain", *flags, **installed.jobs)
    assert list(tmp_path.glob("runs/rl-*/summary.json"))
    assert installed.opened == []


def test_the_guard_notes_a_file_of_the_repository(installed: Installed, tmp_path: Path) -> None:
    installed.run(tmp_path, "python", "-c", f"open({str(ROOT / 'README.md')!r}).close()")
    assert installed.opened == [str(ROOT / "README.md")]
    (installed.folder / "opened").unlink()


def test_written_manifests_are_those_of_the_repository_and_a_new_jobs_files_are_there(
    installed: Installed, tmp_path: Path
) -> None:
    jobs = {"rl": "rl", "ps": "ps-trainers", "job": "job"}
    code = f"""
from rolecall.__main__ import main
for words in {[*(["manifests", job] for job in jobs), ["new", "mine"]]}:
    assert main(words) == 0, words
"""
    out = installed.run(tmp_path, "python", "-c", code)
    assert all(f"kubectl apply -k k8s/{folder} " in out for folder in jobs.values())
    for path in (tmp_path / "k8s").rglob("*"):
        if path.is_file():
            assert path.read_text() == (K8S / path.relative_to(tmp_path / "k8s")).read_text()
    kinds = {path.parent.name for folder in jobs.values() for path in K8S.glob(f"{folder}*/kustomization.yaml")}
    assert {path.name for path in (tmp_path / "k8s").iterdir()} == {*kinds, "base", "components", "lost-pods"}
    assert {"mine.py", "compose.yaml", "kustomization.yaml"} <= {path.name for path in (tmp_path / "mine").iterdir()}


def test_a_file_that_differs_is_kept(tmp_path: Path) -> None:
    folder, _ = manifests.write("rl", tmp_path)
    manifests.write("rl", tmp_path)
    changed = folder / "settings.env"
    changed.write_text("JOB=rl\n")
    with pytest.raises(rolecall.UsageError, match=r"settings\.env: exists already and differs"):
        manifests.write("rl", tmp_path)
    assert changed.read_text() == "JOB=rl\n"
    with pytest.raises(rolecall.UsageError, match="JOB='x': has no manifests"):
        manifests.write("x", tmp_path)
