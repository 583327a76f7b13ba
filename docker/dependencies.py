"""The image's Python packages: `download` them to a folder on the host, `install` them while the image is built.

Both take what pyproject.toml asks for, with all jobs, in the versions of constraints.txt. Torch comes in two builds:
for TORCH=cpu the pinned version, for TORCH=cuda the newest that is allowed, with the CUDA libraries that it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYTHON = "3.11"  # Debian bookworm's, which the image has
GLIBC = (36, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # minor versions that its 2.36 can run wheels for
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
PERIOD = 10.0  # seconds between two lines
OLD = ("manylinux2014", "manylinux2010", "manylinux1", "linux")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("download", "install"))
    parser.add_argument(
        "--wheels", type=Path, required=True, help="folder of wheels; if it is empty, the network is used"
    )
    parser.add_argument("--torch", required=True, help="cpu or cuda")
    parser.add_argument("--index", default="", help="a package index with that build of torch, beside the default one")
    parser.add_argument("--platforms", default="", help="what to download for, as linux/amd64,linux/arm64; or here")
    parser.add_argument("--into", default="", help="python to install for")
    arguments = parser.parse_args()
    if arguments.torch not in ("cpu", "cuda"):
        return refuse(f"TORCH={arguments.torch!r}: no such build (cpu, cuda)")
    platforms = [name for name in arguments.platforms.split(",") if name]
    if unknown := [name for name in platforms if name not in MACHINES]:
        return refuse(f"PLATFORMS={','.join(unknown)}: no such platform ({', '.join(MACHINES)})")
    machines = [MACHINES[name] for name in platforms] or [platform.machine()]
    with tempfile.TemporaryDirectory() as directory:
        wanted = requirements(arguments.torch, Path(directory))
        extra = ["--extra-index-url", arguments.index] if arguments.index else []
        if arguments.action == "download":
            for machine in machines:
                with lines(f"packages for {machine}", Path(directory), arguments.wheels):
                    failed = pip("download", *wanted, *extra, *target(machine), "--dest", str(arguments.wheels),
                                 folder=directory)  # fmt: skip
                if failed:
                    index = (
                        "TORCH_INDEX=ADDRESS names an index with this build of torch, if pip's default index lacks it"
                    )
                    return refuse(f"packages for {machine} could not be downloaded; {index}")
            return 0
        if any(arguments.wheels.glob("*.whl")):
            extra = ["--no-index", "--find-links", str(arguments.wheels)]
        if pip("--python", arguments.into, "install", *wanted, *extra):
            where = "docker/wheels/ (`make wheels` fills it)" if "--no-index" in extra else "the network"
            return refuse(f"packages could not be installed from {where}")
    return check(arguments.torch, arguments.into)


def requirements(torch: str, directory: Path) -> list[str]:
    """pip's arguments for the requirements."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    constraints = Path("constraints.txt").read_text().splitlines(keepends=True)
    if torch == "cuda":
        constraints = [line for line in constraints if not line.startswith("torch==")]
    (directory / "constraints.txt").write_text("".join(constraints))
    wanted = project["dependencies"] + project["optional-dependencies"]["jobs"]
    return ["--constraint", str(directory / "constraints.txt"), *wanted]


def target(machine: str) -> list[str]:
    """pip's arguments for wheels of the image's Python on `machine`, whatever this program itself runs on."""
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)  # as macOS and Windows call them
    names = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"{name}_{machine}" for name in OLD]
    platforms = [part for name in names for part in ("--platform", name)]
    return ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]


def check(torch: str, python: str) -> int:
    """Refuses torch of the other build."""
    code = "import torch; print('cuda' if torch.version.cuda else 'cpu', torch.__version__)"
    build, version = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    if build != torch:
        return refuse(
            f"TORCH={torch}: the build of torch found is {version}, for {build}; `make wheels TORCH={torch}` fills "
            f"docker/wheels/, with TORCH_INDEX=ADDRESS where pip's default index has no such build of torch"
        )
    return 0


def pip(*arguments: str, folder: str = "") -> int:
    """Runs pip, which keeps what it has not finished in `folder`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "TMPDIR": folder} if folder else None
    return subprocess.run(command, check=False, env=environment).returncode


@contextlib.contextmanager
def lines(what: str, *folders: Path) -> Iterator[None]:
    """Where no terminal shows pip's bar, a line every PERIOD seconds says how far `folders` have grown."""
    if sys.stdout.isatty():
        yield
        return
    began, before, over = time.monotonic(), size(*folders), threading.Event()

    def write() -> None:
        while not over.wait(PERIOD):
            megabytes, seconds = (size(*folders) - before) / 1e6, time.monotonic() - began
            print(f"{what}: {megabytes:,.1f} MB, {seconds:.0f} s", file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, name="lines", daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def size(*folders: Path) -> int:
    """The bytes of all files in `folders`."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # pip has moved it just now
                total += path.lstat().st_size if path.is_file() else 0
    return total


def refuse(message: str) -> int:
    print(f"rolecall: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
