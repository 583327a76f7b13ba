"""`rolecall fetch`: where a run's summary, history and newest checkpoint are, or a copy of them."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from rolecall.errors import UsageError
from rolecall.launch import ssh
from rolecall.observe import targets
from rolecall.record import rundir

BEGIN = b"rolecall: what follows is the answer\n"  # after what a login shell has written


def run(words: Sequence[str]) -> int:
    """Runs `rolecall fetch` with `words`. Returns the exit code. Raises UsageError for a run that has written nothing,
    or whose host is not reached, and if a file cannot be copied."""
    arguments = parser().parse_args(words)
    folder = rundir.find(arguments.run)
    last = targets.last_run(folder)
    place: OnThisMachine | Elsewhere = OnThisMachine(folder)
    if last and last.about.host:
        place = OnHost(last.about.host, last.about.directory)
    elif last and last.about.place and targets.run_in(folder):  # its end copies all of it to the folder
        place = Elsewhere(f"{last.about.engine}:{folder.name}/", last.about.place)
    files = chosen(place.names())
    if not files:
        raise UsageError(f"RUN {arguments.run!r}: no such run has written a summary, a history or a checkpoint")
    if arguments.to is None:
        for kind, name in files.items():
            print(f"{kind:<10}  {place.prefix}{name}")
        return 0
    with UsageError.wrap(f"--to {arguments.to}: cannot be written from {place.prefix}", OSError, tarfile.TarError):
        arguments.to.mkdir(parents=True, exist_ok=True)
        place.copy(files.values(), arguments.to)
    print(f"rolecall: copied {', '.join(files.values())} from {place.prefix} to {arguments.to}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rolecall fetch",
        description="Says where the summary, the history and the newest checkpoint of a run are, or copies them.",
    )
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
    parser.add_argument("--to", type=Path, metavar="DIRECTORY", help="copy them there")
    return parser


def chosen(names: Collection[str]) -> dict[str, str]:
    """Those of the `names` in a run's directory that are fetched, by what they are."""
    files = {kind: name for kind, name in (("summary", rundir.SUMMARY), ("history", rundir.HISTORY)) if name in names}
    if newest := max(filter(rundir.NAME.fullmatch, names), default=""):
        files["checkpoint"] = newest
        shards = f"{rundir.SHARDS}/{Path(newest).stem}"
        files |= {"shards": shards} if shards in names else {}
    return files


class OnThisMachine:
    """A run's `directory` on this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.prefix = directory, f"{directory}/"

    def names(self) -> set[str]:
        """What is in it, and in the folder of shards."""
        folders = (self._directory, self._directory / rundir.SHARDS)
        return {str(path.relative_to(self._directory)) for folder in folders for path in folder.glob("*")}

    def copy(self, names: Collection[str], to: Path) -> None:
        """Copies files and folders. Raises OSError."""
        for name in names:
            if (self._directory / name).is_dir():
                shutil.copytree(self._directory / name, to / name, dirs_exist_ok=True)
            else:
                shutil.copy2(self._directory / name, to / name)


class Elsewhere:
    """A run's directory where another command can be run by `place`, with the methods of `OnThisMachine`, which raise
    UsageError if that fails. `prefix` is its name."""

    def __init__(self, prefix: str, place: Sequence[str], directory: str = ".") -> None:
        self.prefix, self._place, self._directory = prefix, place, directory

    def names(self) -> set[str]:
        """See `OnThisMachine`."""
        with self._answer(f"ls -1d * {rundir.SHARDS}/* 2>/dev/null || true") as answer:
            return {*answer.read().decode(errors="replace").splitlines()}

    def copy(self, names: Collection[str], to: Path) -> None:
        """See `OnThisMachine`."""
        with self._answer(f"tar -cf - -- {shlex.join(names)}") as answer:
            with tarfile.open(fileobj=answer, mode="r|") as archive:
                for member in archive:
                    path = PurePosixPath(member.name)
                    if {str(path), str(path.parent)} & {*names} and (content := archive.extractfile(member)):
                        (to / path).parent.mkdir(parents=True, exist_ok=True)
                        with (to / path).open("wb") as file:
                            shutil.copyfileobj(content, file)
            answer.read()  # what fills the last block

    def _command(self, words: Sequence[str], folder: Path) -> list[str]:
        """Runs `words` there; `folder` is a temporary one."""
        return [*self._place, *words]

    def _problem(self, code: int, said: Sequence[str]) -> str:
        """What is wrong if no command can be run there; empty if the command itself has failed."""
        return ""

    @contextlib.contextmanager
    def _answer(self, command: str) -> Iterator[IO[bytes]]:
        """What a command of sh prints that runs in the directory."""
        script = (
            f"cd -- {shlex.quote(self._directory)} && echo {shlex.quote(BEGIN.decode().strip())} && {{ {command}; }}"
        )
        with tempfile.TemporaryDirectory(prefix="rolecall-") as folder, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._command(["sh", "-c", script], Path(folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            with process:
                assert process.stdout
                while (line := process.stdout.readline()) and line != BEGIN:
                    pass
                if line:
                    yield process.stdout
            errors.seek(0)
            said = errors.read().decode(errors="replace").splitlines()
        if problem := self._problem(process.returncode, said):
            raise UsageError(problem)
        if process.returncode or not line:
            raise UsageError(f"{self.prefix}: cannot be read ({(said or ['no reason given'])[-1]})")


class OnHost(Elsewhere):
    """A run's `directory` on `host`, by ssh, which ends a command if the host is silent."""

    def __init__(self, host: str, directory: str) -> None:
        super().__init__(f"{host}:{directory}/", (), directory)
        self._host = host

    def _command(self, words: Sequence[str], folder: Path) -> list[str]:
        return ssh.connect(self._host, folder / "ssh", words)

    def _problem(self, code: int, said: Sequence[str]) -> str:
        return ssh.problem(self._host, "sh", code, said) if code == ssh.FAILED else ""
