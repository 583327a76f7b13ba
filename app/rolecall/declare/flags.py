"""The flags of `rolecall run JOB`: every setting is one."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job
from rolecall.errors import UsageError, did_you_mean
from rolecall.fields import is_secret
from rolecall.record import rundir

# secrets, and what `rolecall run` decides for each rank
NO_FLAG = (
    "job",
    "role",
    "ordinal",
    "rank",
    "world_size",
    "master_addr",
    "port",
    "master_port",
    "metrics_port",
    "bind_addr",
    "job_token",
    "on_finish",
    "leave_code",
)


@dataclass(frozen=True)
class Flags:
    """What the command line gives: settings, by variable, and whether the display is to be `plain`."""

    variables: dict[str, str]
    plain: bool


LOCAL, HOSTS, DOCKER, SLURM, KUBERNETES = ENGINES = "local", "hosts", "docker", "slurm", "kubernetes"
SUBMITTED = (SLURM, KUBERNETES)  # a cluster holds the ranks, and no process of this machine
# flags of some engines alone
FLAGS_OF = {
    "role": (HOSTS, DOCKER, SLURM, KUBERNETES),
    "python": (HOSTS,),
    "image": (DOCKER, KUBERNETES),
    "nodes": (SLURM,),
    "sbatch": (SLURM,),
    "context": (KUBERNETES,),
    "namespace": (KUBERNETES,),
    "dry_run": (SLURM, KUBERNETES),
    "keep": (SLURM, KUBERNETES),
}


@dataclass(frozen=True)
class RunOptions:
    """Where the ranks of `rolecall run` run: the `engine`, and flags of some engines alone. Of each role in `roles`,
    ROLE=TEXT: its hosts, its options of sbatch, or what each member needs."""

    engine: str
    hosts: str
    roles: tuple[str, ...]
    python: str
    image: str
    nodes: int | None
    sbatch: tuple[str, ...]
    context: str
    namespace: str
    dry_run: bool
    keep: bool  # nothing that was made is deleted at the end
    in_process: bool  # as threads of one process
    tied: int  # the process that has started the run, and with which it ends; 0 for none

    @property
    def is_submitted(self) -> bool:
        """Whether the engine is one of SUBMITTED."""
        return self.engine in SUBMITTED


def take_options(arguments: Sequence[str]) -> tuple[RunOptions, list[str]]:
    """The options that say where ranks run, and the other arguments. Raises UsageError."""
    takes = argparse.ArgumentParser(prog="rolecall run", add_help=False, allow_abbrev=False)
    _add_options(takes)
    takes.add_argument("--tied", type=int, default=0)
    given, others = takes.parse_known_args(arguments)
    if None not in (given.on, given.hosts):
        raise UsageError("--hosts: leave it out; --on hosts:HOST,... means the same")
    engine, _, hosts = (given.on or LOCAL if given.hosts is None else f"{HOSTS}:{given.hosts}").partition(":")
    if engine not in ENGINES or (hosts and engine != HOSTS):
        raise UsageError(f"--on {given.on}: must be local, hosts:HOST,..., docker, slurm, or kubernetes")
    if given.in_process and engine != LOCAL:
        raise UsageError(f"--in-process: runs all ranks in one process; leave {'--on' if given.on else '--hosts'} out")
    if engine == HOSTS and not hosts.strip():
        raise UsageError("--hosts: names no host; leave it out to run all ranks on this machine")
    for name, engines in FLAGS_OF.items():
        if getattr(given, name) not in (None, "", [], False) and engine not in engines:
            needed = " or ".join(f"{each}:HOST,HOST" if each == HOSTS else each for each in engines)
            raise UsageError(f"--{name.replace('_', '-')}: needs --on {needed}")
    options = RunOptions(
        engine=engine,
        hosts=hosts,
        roles=tuple(given.role),
        python=given.python or "",
        image=given.image,
        nodes=given.nodes,
        sbatch=tuple(given.sbatch),
        context=given.context,
        namespace=given.namespace,
        dry_run=given.dry_run,
        keep=given.keep,
        in_process=given.in_process,
        tied=given.tied,
    )
    return options, others


def take_name(arguments: Sequence[str]) -> tuple[str, bool, list[str]]:
    """The run's directory, by its name or as --checkpoint-dir gives it, empty for neither; whether it is to be
    detached; and the other arguments. Raises UsageError."""
    takes = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_name(takes)
    takes.add_argument("--checkpoint-dir", default="")
    try:
        given, others = takes.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None
    if given.name is not None:
        given.checkpoint_dir = str(rundir.named(given.name, bool(given.checkpoint_dir)))
    return given.checkpoint_dir, given.detach, others


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="the run's, for commands; its folder is runs/NAME, and the same NAME resumes")
    parser.add_argument("--detach", action="store_true", help="let the run go on when this command has ended")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-process", action="store_true", help="all ranks as threads of one process, to debug a job")
    parser.add_argument(
        "--on", metavar="ENGINE", help="where ranks run: local (default), hosts:HOST,..., docker, slurm, kubernetes"
    )
    group = parser.add_argument_group("ranks elsewhere")
    group.add_argument("--hosts", metavar="HOST,...", help="as --on hosts:HOST,...; or a file with a host a line")
    group.add_argument(
        "--role",
        metavar="ROLE=TEXT",
        action="append",
        default=[],
        help="of a role's ranks: their hosts; their options of sbatch; or, on docker and kubernetes, what each needs, "
        "such as 'cpus=4 memory_mb=8000 gpus=1'; may be repeated",
    )
    group.add_argument("--python", metavar="PATH", help="the Python on the hosts; default: the path of the one here")
    group.add_argument("--image", default="", help="of containers and pods; default: IMAGE:TORCH, or rolecall:cpu")
    group.add_argument("--nodes", type=int, metavar="N", help="of Slurm, for all ranks (default: Slurm decides)")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTIONS", help="of sbatch, such as '--time=2:00:00'"
    )
    group.add_argument("--context", default="", help="kubectl's (default: the current one)")
    group.add_argument("--namespace", default="", help="on kubernetes (default: the context's)")
    group.add_argument("--dry-run", action="store_true", help="print what would be submitted to slurm or kubernetes")
    group.add_argument("--keep", action="store_true", help="delete nothing of the cluster at the end of the run")


def parse(job: Job, target: str, arguments: Sequence[str]) -> Flags:
    """Parses `arguments`. Exits with code 2, or 0 after a request for help, as argparse does. Raises UsageError for a
    setting that no flag can give, and for an unknown flag."""
    takes = parser(job, target)
    takes.add_argument("--given-settings", default="", help=argparse.SUPPRESS)  # `rolecall.start` has set them
    parsed, unknown = takes.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = [option for action in takes._actions for option in action.option_strings]
        meant = did_you_mean(flag.replace("_", "-"), known)
        raise UsageError(f"{flag}: no such flag{meant}; `rolecall run {target} --help` lists them")
    given = vars(parsed)
    for name in ("name", "detach"):  # `take_name` has taken them
        if given.pop(name):
            raise UsageError(f"--{name}: is a flag of `rolecall run` alone; leave it out")
    require_known(job, filter(None, given.pop("given_settings").split(",")))
    plain = bool(given.pop("plain"))
    for name in ("hosts", "in_process", "on", *FLAGS_OF):  # `take_options` has taken them
        given.pop(name)
    for name, value in given.items():
        if not isinstance(value, str):
            raise UsageError(f"--{name.replace('_', '-')}: a list or a table has no flag; set {name.upper()}, as JSON")
    return Flags({name.upper(): value for name, value in given.items() if name in job.settings.model_fields}, plain)


def require_known(job: Job, names: Iterable[str]) -> None:
    """Raises UsageError if `job` has no setting of one of `names`, or `rolecall run` decides it."""
    known = {*job.settings.model_fields} - {*NO_FLAG}
    for name in names:
        if name not in known:
            raise UsageError(f"{name}=: the job has no such setting{did_you_mean(name, known)}")


def parser(job: Job, target: str) -> argparse.ArgumentParser:
    """The flags of `rolecall run` for `job`, which `target` names."""
    parser = argparse.ArgumentParser(
        prog=f"rolecall run {target}",
        description=job.summary or None,
        allow_abbrev=False,
        usage=f"rolecall run {target} [--on ENGINE] [--name NAME] [--detach] [--in-process] [--plain] "
        "[--SETTING VALUE]...",
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of the live display")
    _add_options(parser)
    _add(parser, job, target)
    _add_name(parser)
    return parser


def _add(parser: argparse.ArgumentParser, job: Job, target: str) -> None:
    """Adds a flag for each setting of `job`, its own first; not for a secret, nor for those that `run` decides."""
    fields, shared = job.settings.model_fields, Settings.model_fields
    groups = {
        f"settings of {target}": [name for name in fields if name not in shared and not is_secret(fields[name])],
        "settings of every job": [name for name in shared if name not in NO_FLAG],
    }
    for title, names in groups.items():
        if not names:
            continue
        shown = {name: _as_here(fields[name], target) if name == "checkpoint_dir" else fields[name] for name in names}
        model = create_model("Flags", __base__=BaseSettings, **{n: (shown[n].annotation, shown[n]) for n in names})  # type: ignore[call-overload]
        CliSettingsSource(
            model,
            root_parser=parser.add_argument_group(title),
            parse_args_method=parser.parse_args,
            cli_kebab_case=True,
            cli_hide_none_type=True,
        )
    for action in parser._actions:  # argparse expands % in a help text
        action.help = action.help and action.help.replace("%", "%%")


def _as_here(field: FieldInfo, target: str) -> FieldInfo:
    """CHECKPOINT_DIR with its default of `rolecall run`."""
    field = copy.copy(field)
    field.default = f"runs/{registry.name_of(target)}-TIME"
    return field
