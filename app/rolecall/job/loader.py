"""Loads the user's code, from a file or a module, and says in one line what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

from rolecall.config import UsageError

PACKAGE = Path(__file__).resolve().parents[1]


def load_file(path: Path) -> ModuleType:
    """The file `path` as a module under its stem, so that functions in it can be called over RPC; its folder is last on
    `sys.path`. A file that is loaded already is not run again.

    Raises UsageError where the file cannot be read, its name cannot be a module's, or whatever running it raises.
    """
    name, code = path.stem, compile_file(path)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{path}: {name!r} cannot be the name of a module; rename the file")
    if name in sys.modules:
        other = getattr(sys.modules[name], "__file__", None) or "a part of Python"
        if other != str(path.resolve()):
            raise UsageError(f"{path}: there is a module {name} already ({other}); rename the file")
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    _add_folder(path)
    sys.modules[name] = module
    try:
        with blamed(path):
            exec(code, module.__dict__)
    except UsageError:
        del sys.modules[name]
        raise
    return module


def load_module(name: str) -> ModuleType:
    """Imports the module `name`. Raises UsageError for whatever that raises."""
    with blamed(Path(name)):
        return importlib.import_module(name)


def make_main(path: Path) -> tuple[ModuleType, CodeType]:
    """A fresh `__main__` for the file `path`, and its code, which is not run yet. Raises UsageError as `load_file`."""
    code, module = compile_file(path), ModuleType("__main__")
    module.__file__ = str(path.resolve())
    module.__dict__["__builtins__"] = __builtins__
    _add_folder(path)
    sys.modules["__main__"] = module
    return module, code


def compile_file(path: Path) -> CodeType:
    """The code of the file `path`. Raises UsageError where it cannot be read or is no Python."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    with blamed(path):
        return compile(source, str(path.resolve()), "exec", dont_inherit=True)


def _add_folder(path: Path) -> None:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: no file beside it may replace a library's


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Turns whatever the user's code at `path` raises into one line with the place: `FILE:LINE: TYPE: TEXT`."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        text = (said.strip().splitlines() or [""])[0]
        raise UsageError(f"{locate(error, path)}: {type(error).__name__}: {text}".rstrip(": ")) from error


def locate(error: BaseException, path: Path) -> str:
    """Where the user's code at `path` raised `error`: `FILE:LINE` of the innermost call in the file's folder, or else
    `path` alone."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        place = Path(frame.filename)
        if place.is_relative_to(folder) and not place.is_relative_to(PACKAGE) and "site-packages" not in place.parts:
            return f"{_shown(frame.filename)}:{frame.lineno}"
    return str(path)


def _shown(file: str) -> str:
    """A path as the user knows it: relative where it lies below the working directory."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` without the frames of this package on top."""
    trace = error.__traceback__
    while trace is not None and _ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _ours(file: str) -> bool:
    return file.startswith("<frozen importlib") or Path(file).is_relative_to(PACKAGE)
