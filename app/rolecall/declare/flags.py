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


@dataclass(frozen=True)
class HostOptions:
    """Where the ranks of `rolecall run` run; without `hosts`, all on this machine."""

    hosts: str
    roles: tuple[str, ...]
    python: str
    in_process: bool = False  # as threads of one process
    tied: int = 0  # the process that has started the run, and with which it ends


def take_host_options(arguments: Sequence[str]) -> tuple[HostOptions, list[str]]:
    """The options for hosts, and the other arguments. Raises UsageError."""
    takes = argparse.ArgumentParser(prog="rolecall run", add_help=False, allow_abbrev=False)
    _add_host_options(takes)
    takes.add_argument("--tied", type=int, default=0)
    given, others = takes.parse_known_args(arguments)
    options = HostOptions(given.hosts or "", tuple(given.role), given.python or "", given.in_process, given.tied)
    if given.in_process and given.hosts:
        raise UsageError("--in-process: runs all ranks in one process; leave --hosts out")
    if given.hosts is not None and not given.hosts.strip():
        raise UsageError("--hosts: names no host; leave it out to run all ranks on this machine")
    if not options.hosts and (options.roles or options.python):
        raise UsageError(f"{'--role' if options.roles else '--python'}: needs --hosts HOST,HOST or --hosts FILE")
    return options, others


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-process", action="store_true", help="all ranks as threads of one process, to debug a job")
    group = parser.add_argument_group("ranks on other machines, by ssh")
    group.add_argument("--hosts", metavar="HOST,...", help="where ranks run, in turn; or a file with a host a line")
    group.add_argument(
        "--role",
        metavar="ROLE=HOST,...",
        action="append",
        default=[],
        help="where the ranks of a role run; may be repeated",
    )
    group.add_argument("--python", metavar="PATH", help="the Python there; default: the path of the one here")


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
    require_known(job, filter(None, given.pop("given_settings").split(",")))
    plain = bool(given.pop("plain"))
    for name in ("hosts", "role", "python", "in_process"):  # `take_host_options` has taken them
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
        usage=f"rolecall run {target} [--plain] [--in-process] [--hosts HOST,...] [--SETTING VALUE]...",
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of the live display")
    _add_host_options(parser)
    _add(parser, job, target)
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
