"""The source of a user's job as it was when its rank, or `rolecall run`, started: all processes of it import that.

A worker imports the job's file anew in each generation. If it read the disk, one generation could mix versions of it.
Code keeps the names of its files, so tracebacks, `__file__` and pickled functions are as without.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import importlib.util
import json
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from rolecall import config
from rolecall.errors import UsageError

MOST_FILES = 2000  # of one job; more lie in a folder that is not the job's alone, and are read when they are imported
MOST_BYTES = 32 * 2**20
PREFIX = "rolecall-source-"  # of a file that is passed on, in the temporary folder; its process has it locked
WORD = re.compile(rb"\w+")
Sources = dict[str, bytes]  # by path


def take(file: Path) -> Sources:
    """The content of `file` and of the modules beside it, packages included. What cannot be read is left out."""
    sources, size = Sources(), 0
    for path in [file, *_beside(file.parent)]:
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            size += len(content)
            if len(sources) >= MOST_FILES or size > MOST_BYTES:
                break
            sources[str(path)] = content
    return sources


def complete(sources: Sources, file: Path) -> bool:
    """Whether `sources`, taken of `file`, has all that belongs to it."""
    return {*sources} >= {str(path) for path in (file, *_beside(file.parent))}


def _beside(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        entries = sorted(folder.iterdir())
        yield from (path for path in entries if path.suffix == ".py")
        for path in entries:
            if (path / "__init__.py").is_file():
                yield from _beside(path)


@contextlib.contextmanager
def passed_on(sources: Sources) -> Iterator[None]:
    """Within the block, the processes that this one starts import `sources`; without any, what was passed on to it."""
    if not sources:
        yield
        return
    file, new = tempfile.mkstemp(prefix="rolecall-new-")
    with os.fdopen(file, "w") as output:  # open, so locked, for as long as this process needs it
        fcntl.flock(output, fcntl.LOCK_EX)
        path = Path(new).rename(Path(new).with_name(Path(new).name.replace("rolecall-new-", PREFIX, 1)))
        try:
            json.dump({path: base64.b64encode(content).decode() for path, content in sources.items()}, output)
            output.flush()
            config.export(**{config.SOURCES: str(path)})
            yield
        finally:
            config.forget(config.SOURCES)
            path.unlink(missing_ok=True)


def taken() -> Sources:
    """What this process imports; empty if nothing was passed on to it, and it reads the disk."""
    return _read(name) if (name := config.exported(config.SOURCES)) else {}


@functools.cache
def _read(name: str) -> Sources:
    """Reads what was passed on; from now on its modules are files in it, at their places on `sys.path`."""
    with UsageError.wrap(f"{name}: the job's source cannot be read; start its rank anew", OSError):
        sources = {path: base64.b64decode(content) for path, content in json.loads(Path(name).read_text()).items()}
    sys.path_hooks.insert(0, functools.partial(_finder, sources))
    sys.path_importer_cache.clear()
    return sources


def content(path: Path) -> bytes:
    """The content of a user's file. Raises OSError."""
    content = taken().get(str(path))
    if content is None:
        return path.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError):  # its import says what is wrong
        lines = importlib.util.decode_source(content).splitlines(keepends=True)
        linecache.cache[str(path)] = (len(content), None, lines, str(path))  # for tracebacks: the disk has others
    return content


def spec_of(name: str, path: Path) -> ModuleSpec | None:
    """How the module `name` is loaded from the file `path`."""
    loader = _Loader(name, str(path)) if str(path) in taken() else None
    return importlib.util.spec_from_file_location(name, path, loader=loader)


def changed(named: str = "") -> list[str]:
    """The job's files that have changed on disk since they were taken, but for those that it does not use, as far as
    its words say: no file that it uses, nor `named`, has the name of their module."""
    files = [path for path, content in taken().items() if _differs(Path(path), content)]
    used = _used(named) if files else set[str]()
    return [path for path in files if path in used]


def _used(named: str) -> set[str]:
    """What was taken of the files that the first one, the job's, uses."""
    used, words = set[str](), {*WORD.findall(named.encode())}
    files = [*taken()][:1]
    while files:
        used |= {*files}
        words |= {word for path in files for word in WORD.findall(taken()[path])}
        files = [path for path in taken() if path not in used and _module(Path(path)).encode() in words]
    return used


def _module(path: Path) -> str:
    return path.parent.name if path.name == "__init__.py" else path.stem


def _differs(path: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() != content
    return True


class _Loader(SourceFileLoader):
    """Loads a module from what was taken."""

    def get_data(self, path: str) -> bytes:
        return content(Path(path))

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("no cached code is used: it may be of the file on disk")


class _Finder:
    """Finds the modules of one folder in what was taken; others, such as extensions, on disk."""

    def __init__(self, folder: str, sources: Sources, others: FileFinder) -> None:
        self._folder, self._sources, self._others = Path(folder), sources, others

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        stem = name.rpartition(".")[2]
        for path in (self._folder / stem / "__init__.py", self._folder / f"{stem}.py"):
            if str(path) in self._sources:
                return spec_of(name, path)
        return self._others.find_spec(name, target)

    def invalidate_caches(self) -> None:
        self._others.invalidate_caches()


def _finder(sources: Sources, folder: str) -> _Finder:
    """A hook of `sys.path_hooks`. Raises ImportError for a folder of which nothing was taken."""
    place = Path(folder)
    if not any(Path(path).parent == place or Path(path).parents[1:2] == (place,) for path in sources):
        raise ImportError(folder)
    for hook in sys.path_hooks[1:]:
        with contextlib.suppress(ImportError):
            return _Finder(folder, sources, hook(folder))  # type: ignore[arg-type]
    raise ImportError(folder)
