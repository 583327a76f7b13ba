"""The names of jobs, and the rank of a process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rolecall import config, machine
from rolecall.config import Settings
from rolecall.declare import loader, sources
from rolecall.declare.spec import MOST, Function, Job, Role
from rolecall.errors import UsageError
from rolecall.gang.protocol import RoleSpec

# the built-in jobs, and the packages of each one's extra, as they are imported
JOBS = {"rl": ["gymnasium"], "ps": ["sklearn"], "rnn": ["joblib"], "hybrid": ["joblib"], "script": list[str]()}
SCRIPT = "script"  # the job that runs a program without one
FIND_SECONDS = 20.0  # for another process to find a package


@dataclass(frozen=True)
class Identity:
    """A process's role and ordinal; `role` is empty, and `ordinal` None, if the gang assigns one."""

    role: str
    ordinal: int | None


def get(target: str) -> Job:
    """The job that `target` names: a built-in one, FILE.py, or package.module, with :NAME if it is not called JOB.

    Raises UsageError, with file and line if the user's file is wrong.
    """
    require_target(target)
    module = module_of(target)
    name = loader.split(target)[1] or "JOB"
    job = getattr(module, name, None)
    if not isinstance(job, Job):
        where = loader.shown(Path(module.__file__)) if module.__file__ else module.__name__
        raise UsageError(
            f"{where}: has no {name} = Job(...); a program without one runs by `rolecall run FILE --ranks N`"
        )
    return job


def holder_of(job: Job) -> tuple[ModuleType, str] | None:
    """The module that holds `job`, and the name of its variable there; None if no module does. One that others can
    import comes before `__main__`, and the one that declares it first, then the one
    with its classes."""
    declares, theirs = getattr(job, "declared_in", ""), {getattr(role.run, "__module__", "") for role in job.roles}
    modules = sorted(
        [*sys.modules.items()], key=lambda item: (item[0] == "__main__", item[0] != declares, item[0] not in theirs)
    )
    for _, module in modules:
        names = [name for name, value in [*getattr(module, "__dict__", {}).items()] if value is job]
        if names and isinstance(module, ModuleType):
            return module, "JOB" if "JOB" in names else names[0]
    return None


def target_of(job: Job) -> str:
    """What names `job` for processes of its ranks. Raises UsageError if no file that they could import holds it."""
    module, name = holder_of(job) or (ModuleType("__main__"), "")
    full = module.__spec__.name if module.__spec__ else module.__name__
    file = getattr(module, "__file__", None)
    if not name or not file or not Path(file).is_file():
        in_main = name or any(getattr(role.run, "__module__", "") == "__main__" for role in job.roles)
        where = "a notebook's cell or a prompt" if in_main else "no variable of a module"
        raise UsageError(
            f"the job is held by {where}, and ranks are processes that import its file: write that by "
            "`%%writefile myjob.py`, and name it (`rolecall.start('myjob.py')`); or run it with in_process=True"
        )
    top = full.partition(".")[0]
    path = getattr(sys.modules.get(top), "__path__", None)
    if path is None and loader.is_users(file):
        return f"{loader.shown(Path(file).absolute())}{'' if name == 'JOB' else f':{name}'}"
    folder = Path(next(iter(path or [file]))).absolute().parent
    here = {Path.cwd(), *map(Path, config.python_path())}
    if loader.is_users(file) and folder not in here and not _is_found(top, folder):
        raise UsageError(
            f"{full}: ranks do not find it from here; start Python in {folder}, or set PYTHONPATH={folder}"
        )
    return full if name == "JOB" and "." in full else f"{full}:{name}"


def _is_found(package: str, folder: Path) -> bool:
    """Whether every Python here finds `package` in `folder`, as after `pip install --editable`."""
    program = "import importlib.util, sys; print(*importlib.util.find_spec(sys.argv[1]).submodule_search_locations)"
    command = [sys.executable, "-P", "-c", program, package]
    with contextlib.suppress(subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIND_SECONDS, check=True)
        return done.stdout.strip() == str(folder / package)
    return False


def require_target(target: str) -> None:
    """Raises UsageError if `target` is neither a built-in job's name nor looks like a file or a module."""
    if target not in JOBS and not loader.is_file(target) and not re.search(r"[.:]", target):
        problem = "no such job" if target else "is missing"
        raise UsageError(f"JOB={target!r}: {problem} ({', '.join(JOBS)}, FILE.py or package.module)")


def module_of(target: str) -> ModuleType:
    """The module of the job that `target` names. Raises UsageError."""
    if target in JOBS:
        return importlib.import_module(f"rolecall.jobs.{target}")
    return loader.load(loader.split(target)[0])


def require_extra(target: str) -> None:
    """Raises UsageError if `target` is a built-in job whose extra is not installed."""
    machine.require_packages(f"JOB={target}", JOBS.get(target, ()), target)


def sources_of(target: str) -> sources.Sources:
    """The source of the user's job or program that `target` names, as it is on disk now; empty for a built-in job and
    for what is installed. Raises UsageError if the file does not exist.
    """
    place = loader.split(target)[0]
    if target in JOBS or not place:
        return {}
    if loader.is_file(place):
        return sources.take(loader.file_of(place))
    with contextlib.suppress(ImportError, ValueError):  # its import says what is wrong
        spec = importlib.util.find_spec(place.partition(".")[0])
        if spec and spec.origin and loader.is_users(spec.origin):
            return sources.take(Path(spec.origin))
    return {}


def name_of(target: str) -> str:
    """The short name of the job that `target` names: of its run directories, checkpoints and metrics."""
    place, name = loader.split(target)
    stem = loader.file_of(place).stem if loader.is_file(place) else place.rpartition(".")[2]
    return stem if name in ("", "JOB") else f"{stem}-{name.lower()}"


def absolute(target: str) -> str:
    """`target`, so that it names the same job in any working directory."""
    place, name = loader.split(target)
    return f"{Path(place).absolute()}" + (f":{name}" if name else "") if loader.is_file(place) else target


def program(target: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The job that a command line names, and its flags. A program without a job, which is given --ranks or arguments of
    its own, is one of the job `script`."""
    flags, arguments = list(words), list[str]()
    if "--" in flags:
        flags, arguments = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
    if target in JOBS or not (arguments or any(word.partition("=")[0] == "--ranks" for word in flags)):
        return target, words
    return SCRIPT, [*flags, f"--script={absolute(target)}", f"--script-args={shlex.join(arguments)}"]


def load(target: str = "", **overrides: Any) -> tuple[Job, Settings]:
    """The job that `target`, or else JOB, names, and its settings; `overrides`, by field, win over the environment.

    Raises UsageError for an unknown job or wrong settings.
    """
    target = target or config.job_name()
    job = get(target)
    return job, config.load(job.settings, **{**overrides, "job": target})


def resolve(function: Function) -> Callable[..., Any]:
    """`function` itself, or the one that a `module:function` names. Raises UsageError if it is of a built-in job whose
    extra is not installed."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    if module.startswith("rolecall.jobs."):
        require_extra(module.split(".")[2])
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


def has_method(role: Role, method: Callable[..., Any]) -> bool:
    """Whether the class of `role` has `method`, perhaps from a class above it."""
    kind = resolve(role.run) if role.run else None
    name = getattr(method, "__name__", "")
    return inspect.isclass(kind) and inspect.getattr_static(kind, name, None) is method


def _number(value: str | int, settings: Settings) -> int:
    return value if isinstance(value, int) else int(getattr(settings, value.lower()))


def roles(job: Job, settings: Settings) -> tuple[RoleSpec, ...]:
    """The job's roles with their counts filled in. Raises UsageError for counts that contradict each other."""
    specs = []
    for role in job.roles:
        count = _number(role.count, settings)
        low = count if role.minimum is None else _number(role.minimum, settings)
        most = max(count, MOST) if role.elastic else count
        high = most if role.maximum is None else _number(role.maximum, settings)
        if (role.minimum, role.maximum) == (None, None) and count < 1:
            named = role.count.upper() if isinstance(role.count, str) else "count"
            raise UsageError(f"wrong settings: {named}={count} must be at least 1: the role {role.name} has so many")
        if not 1 <= low <= count <= high:
            counts = {"count": (role.count, count), "minimum": (role.minimum, low), "maximum": (role.maximum, high)}
            spelled = [f"{name.upper() if isinstance(name, str) else kind}={n}" for kind, (name, n) in counts.items()]
            raise UsageError(
                f"wrong settings: {spelled[0]} must lie between {spelled[1]} and {spelled[2]}, all at least 1"
            )
        stays = role.elastic and not inspect.isfunction(role.run) if role.stays is None else role.stays
        specs.append(
            RoleSpec(
                role.name,
                count,
                low,
                high,
                role.elastic,
                stays=bool(role.run) and stays and job.rpc,
                restarts=role.restarts,
                backoff=role.backoff,
                required=role.required,
                max_memory_mb=role.max_memory_mb,
            )
        )
    return tuple(specs)


def identity(roles: Sequence[RoleSpec], settings: Settings, host: str) -> Identity:
    """The rank of this process, from ROLE and ORDINAL, the host name, or RANK, which srun and torchrun say too.

    A host name gives an ordinal if it is exactly <role>-<n> or ends in -<role>-<n>, as a StatefulSet's pods do, and
    a rank if it so ends in rank-<n>. Without any of them, and beyond the counts, the gang assigns role and ordinal.
    Raises UsageError if the role is unknown, or RANK or the ordinal is out of range.
    """
    total, most = sum(role.count for role in roles), sum(role.maximum for role in roles)
    size = settings.world_size
    if size is not None and not total <= size <= most and not settings.role:
        spelled = " + ".join(f"{role.count} {role.name}" for role in roles)
        room = f", at most {most}" if most > total else ""
        raise UsageError(f"{config.size_variable()}={size}: the counts make {total} ({spelled}){room}")
    if not settings.role:
        limit = most if size is None else size
        if settings.rank is not None and settings.rank >= limit:
            raise UsageError(f"RANK={settings.rank}: the job has ranks 0 to {limit - 1}")
        rank = _number_in(host, "rank") if settings.rank is None else settings.rank
        if rank is None and settings.ordinal is not None:
            raise UsageError(f"ORDINAL={settings.ordinal}: of which ROLE? ({', '.join(role.name for role in roles)})")
        return Identity("", None) if rank is None or rank >= total else _by_rank(roles, rank)
    by_name = {role.name: role for role in roles}
    if settings.role not in by_name:
        raise UsageError(f"ROLE={settings.role!r}: no such role ({', '.join(by_name)})")
    role = by_name[settings.role]
    ordinal, source = settings.ordinal, f"ORDINAL={settings.ordinal}"
    if ordinal is None:
        ordinal, source = _number_in(host, role.name), f"the host name {host}"
    if ordinal is None and role.maximum == 1:
        ordinal = 0
    if ordinal is not None and ordinal >= role.maximum:
        raise UsageError(f"{source}: {role.name} has ordinals 0 to {role.maximum - 1}")
    return Identity(role.name, ordinal)


def _by_rank(roles: Sequence[RoleSpec], rank: int) -> Identity:
    """The place of rank `rank` if the roles are filled in order, each up to its count."""
    places = [(role.name, ordinal) for role in roles for ordinal in range(role.count)]
    return Identity(*places[rank])


def _number_in(host: str, name: str) -> int | None:
    match = re.search(rf"(?:^|-){re.escape(name)}-(\d{{1,4}})$", host)
    return int(match.group(1)) if match else None
