"""Loads a user's file or module, and says where in it an error lies."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import keyword
import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, ModuleType

from rolecall.declare import sources
from rolecall.errors import RemoteTraceback, UsageError

TEST = re.compile(r"test_.*\.py|.*_test\.py|conftest\.py")  # files that are pytest's
PACKAGE = Path(__file__).absolute().parents[1]
_INSTALLED = (*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
LIBRARIES = {folder for path in _INSTALLED for folder in (Path(path), Path(path).resolve())}  # a venv may be a link
if sys.version_info >= (3, 14):  # annotations may name what only type checkers import
    import annotationlib

    signature = functools.partial(inspect.signature, annotation_format=annotationlib.Format.FORWARDREF)
    annotations_of = functools.partial(annotationlib.get_annotations, format=annotationlib.Format.FORWARDREF)
else:
    signature, annotations_of = inspect.signature, inspect.get_annotations
_importing: list[str] = []  # files and modules
_loaded: dict[str, bytes] = {}  # files, as they were loaded


def is_file(target: str) -> bool:
    """Whether `target` names a file (or a folder) rather than a module."""
    return target.partition(":")[0].endswith(".py") or "/" in target


def split(target: str) -> tuple[str, str]:
    """`target` as (file or module, name in it, which may be empty)."""
    place, _, name = target.partition(":")
    return place, name


def file_of(place: str) -> Path:
    """The absolute path of a user's file; of a folder, its one Python file beside its tests. Raises UsageError."""
    path = Path(place).absolute()
    if path.is_dir():
        files = sorted(file for file in path.glob("*.py") if not TEST.fullmatch(file.name))
        if len(files) != 1:
            problem = f"a folder must hold one Python file beside its tests, and has {len(files)}"
            raise UsageError(f"{place}: {problem}; name the file")
        return files[0]
    if not path.is_file():
        raise UsageError(f"{place}: no such file")
    return path


def load(place: str) -> ModuleType:
    """Imports a file or a module. Raises UsageError, with file and line, for whatever that raises."""
    if is_file(place):
        return load_file(file_of(place))
    sources.taken()  # it is found there
    _importing.append(place)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UsageError(explain(error, f"{place} cannot be imported")) from error
    finally:
        _importing.pop()


def require_imported() -> None:
    """Raises UsageError while a job's file is imported, which then starts a run: each of its ranks would."""
    if _importing:
        problem = "starts a run when it is imported, as every rank does that"
        raise UsageError(f'{_importing[-1]} {problem}; put it below `if __name__ == "__main__":`')


def load_file(path: Path) -> ModuleType:
    """Loads a file as a module under its stem, so that its functions can be called over RPC by that name. The modules
    beside it can be imported. Raises UsageError, with file and line, for whatever the file raises.
    """
    path = path.absolute()
    name = path.stem
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{path.name}: {name!r} is no name for a module; rename the file")
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    if module is not None or name in sys.stdlib_module_names or _is_installed(name):
        raise UsageError(f"{path.name}: a module {name!r} exists already; rename the file")
    add_folder(path.parent)
    spec = sources.spec_of(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name}: is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _importing.append(path.name)
    try:
        _loaded[str(path)] = sources.content(path)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(explain(error, f"{path.name} cannot be imported")) from error
    finally:
        _importing.pop()
    return module


def forget_changed(place: str) -> None:
    """Has the next `load` of a file load it again if it has changed since; not the modules that it imports."""
    if is_file(place):
        path = file_of(place)
        module = sys.modules.get(path.stem)
        is_it = module is not None and getattr(module, "__file__", None) == str(path)
        if is_it and _loaded.get(str(path)) not in (None, path.read_bytes()):
            del sys.modules[path.stem]
            with contextlib.suppress(OSError):  # bytecode is taken for that of a file of the same size and second
                Path(importlib.util.cache_from_source(str(path))).unlink()


def add_folder(folder: Path) -> None:
    """Has the modules in a file's folder found: after those of libraries, before those of the working directory."""
    here = str(Path.cwd())
    if str(folder) not in sys.path:
        sys.path.insert(sys.path.index(here) if here in sys.path else len(sys.path), str(folder))


def compile_file(path: Path) -> CodeType:
    """The code of a file, which is not run. Raises UsageError if it cannot be read or is no Python."""
    try:
        return compile(sources.content(path), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{shown(path)}: cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(explain(error, shown(path))) from error


def takes_more(place: Path | str, function: str, than: int) -> bool:
    """Whether the text of a file, or of a module, defines `function` with more than so many parameters that must be
    given. False if the text does not tell.
    """
    try:
        spec = None if isinstance(place, Path) else importlib.util.find_spec(place)
        tree = ast.parse(Path(spec.origin if spec and spec.origin else place).read_bytes())
    except (Exception, SystemExit):  # it is imported next, which says what is wrong
        return False
    taken = [
        len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return taken[-1] > than if taken else False


def make_main(path: Path) -> tuple[ModuleType, CodeType]:
    """A fresh `__main__` for a file, and its code, which is not run yet. Raises UsageError as `compile_file`."""
    code, module = compile_file(path), ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = __builtins__
    add_folder(path.parent)
    sys.modules["__main__"] = module
    return module, code


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and not is_users(spec.origin)


def explain(error: BaseException, otherwise: str = "") -> str:
    """What went wrong in a user's file, in a line: `FILE:LINE: TYPE: TEXT`, or `otherwise` for an unknown place."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, SyntaxError) and is_users(error.filename or ""):
        return f"{shown(Path(error.filename or ''))}:{error.lineno}: {type(error).__name__}: {error.msg}"
    what = text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    place = locate(error)
    return f"{place}: {what}" if place else f"{otherwise}: {what}" if otherwise else what


def with_place(error: BaseException) -> str:
    """The text of an error, and the user's line that led to its cause: `TEXT (FILE:LINE)`."""
    place = locate(error.__cause__) if error.__cause__ else ""
    return f"{error} ({place})" if place else str(error)


def locate(error: BaseException) -> str:
    """`FILE:LINE` of the innermost line of a user's file that led to `error`; empty if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            place = f"{shown(Path(frame.f_code.co_filename))}:{line}"
    return place


def is_users(filename: str) -> bool:
    """Whether a code's file is neither Rolecall's nor a library's."""
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))


def shown(path: Path) -> str:
    """A path as the user would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def users_traceback(error: BaseException) -> str:
    """The traceback of `error` without Rolecall's frames, but for those of its jobs: up to 8,000 characters. That of a
    peer comes first, once."""
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    while part is not None:
        theirs = [frame for frame in part.stack if not _is_ours(frame.filename)]
        part.stack = traceback.StackSummary.from_list(theirs or part.stack)
        part = part.__cause__ or part.__context__
    cause = error.__cause__
    if report.__cause__ and cause and not cause.__traceback__ and isinstance(cause.__cause__, RemoteTraceback):
        report.__cause__ = report.__cause__.__cause__  # whose text ends with the error that lies between
    return "".join(report.format()).replace(f"{RemoteTraceback.__module__}.{RemoteTraceback.__name__}: \n", "")[-8000:]


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "jobs")
