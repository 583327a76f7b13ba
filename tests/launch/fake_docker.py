"""`docker` for tests: a container is a process on this machine, with the variables that it is given, and no others.

What there is, is in the folder $FAKE_DOCKER: a file for each container, with the process's number, and for each
network; each holds its label. Mounted folders are where they are here. Some images have a fault, by their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

FAULTS = {
    "absent:cpu": "[]\nError: No such image: absent:cpu",
    "closed:cpu": "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
    "down:cpu": "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
}
OLD = "old:cpu"  # has another version
REFUSED = 125  # the exit code of docker's own errors


def install(folder: Path) -> dict[str, str]:
    """The environment in which `docker` is this."""
    script = folder / "bin" / "docker"
    script.parent.mkdir()
    for kind in ("container", "network"):
        (folder / kind).mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__)} "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{os.environ['PATH']}", "FAKE_DOCKER": str(folder)}


def main(words: Sequence[str]) -> int:
    folder = Path(os.environ["FAKE_DOCKER"])
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    names = [word for word in words if not word.startswith("--")]
    match names:
        case ["image", "inspect", image]:
            version = {"org.opencontainers.image.title": "rolecall", "org.opencontainers.image.version": "0.0.1"}
            print(FAULTS.get(image) or json.dumps(version if image == OLD else None))
            return int(image in FAULTS)
        case ["network", "create", name]:
            (folder / "network" / name).write_text(json.dumps({"label": options["label"]}))
        case ["container" | "network" as kind, "ls"]:
            label = options["filter"].removeprefix("label=")
            print("\n".join(_id(path.name) for path in (folder / kind).iterdir() if _read(path)["label"] == label))
        case ["container" | "network" as kind, "rm", *ids]:
            for path in [path for path in (folder / kind).iterdir() if _id(path.name) in ids]:
                _kill(path, signal.SIGKILL)
                path.unlink(missing_ok=True)
        case ["kill", name]:
            return _kill(folder / "container" / name, signal.Signals[f"SIG{options.get('signal', 'KILL')}"])
        case ["run", *_]:
            return _run(folder, words, options)
    return 0


def _id(name: str) -> str:
    return name.encode().hex()[:64].rjust(12, "0")


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):  # it is being removed
        return dict(json.loads(path.read_text()))
    return {"label": ""}


def _kill(container: Path, number: signal.Signals) -> int:
    """As `docker kill`: SIGKILL ends all processes of the container."""
    try:
        first = psutil.Process(int(_read(container)["pid"]))
        below = first.children(recursive=True) if number == signal.SIGKILL else []
        for process in (first, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    except (KeyError, psutil.NoSuchProcess):
        print(f"Error response from daemon: {container.name} is not running", file=sys.stderr)
        return 1
    return 0


def _run(folder: Path, words: Sequence[str], options: dict[str, str]) -> int:
    container = folder / "container" / options["name"]
    assert (folder / "network" / options["network"]).exists()
    fields = [
        dict(field.strip('"').partition("=")[::2] for field in word.removeprefix("--mount=").split(","))
        for word in words
        if word.startswith("--mount=")
    ]
    mounts = {each["target"]: each["source"] for each in fields}
    here = {**mounts, "rank0": "127.0.0.1"}
    given = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    variables = dict(each.partition("=")[::2] if "=" in each else (each, os.environ[each]) for each in given)
    environment = {name: here.get(value, value) for name, value in variables.items()}
    inspected = {"label": options["label"], "user": options["user"], "shown": repr((words, variables))}
    command = [sys.executable, *words[words.index("python") + 1 :]]
    with subprocess.Popen(
        command,
        cwd=mounts.get(options.get("workdir", ""), folder),
        env={"PATH": os.environ["PATH"], **environment, "TMPDIR": str(folder)},
        start_new_session=True,
    ) as process:
        container.write_text(json.dumps({**inspected, "pid": process.pid}))
        code = process.wait()
    container.unlink(missing_ok=True)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
