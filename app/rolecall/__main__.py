"""The command line. Without an argument: runs the rank that the environment names."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import create_model
from pydantic_settings import BaseSettings, CliSettingsSource
from rich.console import Console
from rich.table import Table

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import USAGE
from rolecall.job import checkpoint, registry

# secrets, and what `rolecall run` decides for each rank
NO_FLAG = ("job", "role", "ordinal", "rank", "world_size", "master_addr", "master_port", "control_port", "metrics_port",
           "bind_addr", "job_token", "on_finish")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input, 3 the job failed, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # settings name the user's modules; those of libraries come first
    try:
        return int(arguments.handler(arguments))
    except UsageError as error:
        print(f"rolecall: {error}", file=sys.stderr, flush=True)
        return USAGE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rolecall", description=__doc__)
    parser.set_defaults(handler=_rank, tied=0)
    commands = parser.add_subparsers(metavar="COMMAND")
    rank = commands.add_parser("rank", help="run the rank that the environment names (the default)")
    rank.add_argument("--tied", type=int, default=0, metavar="PID", help="end with this parent process")
    rank.set_defaults(handler=_rank)
    run = commands.add_parser("run", help="run every rank of a job as a process on this machine")
    jobs = run.add_subparsers(metavar="JOB", dest="job", required=True)
    for name in registry.JOBS:
        job = jobs.add_parser(name, help=registry.get(name).summary, allow_abbrev=False,
                              usage=f"rolecall run {name} [--plain] [--SETTING VALUE]...")  # fmt: skip
        job.add_argument("--plain", action="store_true", help="lines instead of the live display")
        _add_flags(job, name)
    run.set_defaults(handler=_run)
    watch = commands.add_parser("watch", help="the live display of ranks that run anywhere, from their metrics")
    watch.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="a port, host:port or URL of a rank's metrics, or the folder of `rolecall run`",
    )
    watch.add_argument("--plain", action="store_true", help="lines instead of the live display")
    watch.add_argument("--once", action="store_true", help="display the ranks once, and end")
    watch.add_argument("--timeout", type=_seconds, default=30.0, help="seconds without an answer to end after (30)")
    watch.set_defaults(handler=_watch)
    show = commands.add_parser("config", help="list the variables")
    show.add_argument("job", nargs="?", choices=registry.JOBS)
    show.add_argument("--markdown", action="store_true", help="as a Markdown table")
    show.set_defaults(handler=_config)
    metrics = commands.add_parser("metrics", help="list the metrics")
    metrics.add_argument("job", nargs="?", choices=registry.JOBS)
    metrics.add_argument("--markdown", action="store_true", help="as a Markdown table")
    metrics.set_defaults(handler=_metrics)
    evaluate = commands.add_parser("eval", help="evaluate a checkpoint")
    evaluate.add_argument("job", choices=registry.JOBS)
    evaluate.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or a directory of them")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument("--prompt", metavar="TEXT", help="generate a continuation of TEXT instead (rnn)")
    evaluate.set_defaults(handler=_evaluate)
    commands.add_parser("jobs", help="list the jobs and their roles").set_defaults(handler=_jobs)
    return parser


def _add_flags(parser: argparse.ArgumentParser, job: str) -> None:
    """Adds a flag for each setting of `job`, its own first; not for a secret, nor for those that `run` decides."""
    fields, shared = registry.get(job).settings.model_fields, Settings.model_fields
    groups = {
        f"settings of {job}": [name for name in fields if name not in shared],
        "settings of every job": [name for name in shared if name not in NO_FLAG],
    }
    for title, names in groups.items():
        model = create_model("Flags", __base__=BaseSettings, **{n: (fields[n].annotation, fields[n]) for n in names})  # type: ignore[call-overload]
        CliSettingsSource(model, root_parser=parser.add_argument_group(title), parse_args_method=parser.parse_args,
                          cli_kebab_case=True, cli_hide_none_type=True)  # fmt: skip


def _rank(arguments: argparse.Namespace) -> int:
    from rolecall.rank import supervisor  # here and below: other commands start without it

    job, settings = registry.load()
    identity = registry.identity(job, settings, config.host_name())
    telemetry.setup_logging(settings.log_format, settings.log_level, role=identity.role, ordinal=identity.ordinal)
    telemetry.warn_misspelt(job.settings)
    return supervisor.run(job, settings, identity, arguments.tied)


def _run(arguments: argparse.Namespace) -> int:
    from rolecall.watch import local

    fields = registry.get(arguments.job).settings.model_fields
    flags = {name.upper(): value for name, value in vars(arguments).items() if name in fields and name not in NO_FLAG}
    return local.run(arguments.job, flags, arguments.plain)


def _watch(arguments: argparse.Namespace) -> int:
    from rolecall.watch import viewer

    return viewer.run(arguments.targets, arguments.plain, arguments.once, arguments.timeout)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _config(arguments: argparse.Namespace) -> int:
    settings = registry.get(arguments.job).settings if arguments.job else Settings
    _print(("variable", "type", "default", "bounds", "meaning"), config.variables(settings), arguments.markdown)
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    _print(("metric", "kind", "labels", "where", "meaning"), telemetry.catalogue(_job_metrics(arguments.job)),
           arguments.markdown)  # fmt: skip
    return 0


def _job_metrics(name: str | None) -> tuple[telemetry.Metric, ...]:
    return registry.get(name).metrics if name else ()


def _jobs(arguments: argparse.Namespace) -> int:
    rows = []
    for name in registry.JOBS:
        job = registry.get(name)
        roles = ", ".join(role.name + (f" x {role.count}" if role.count else "") for role in job.roles)
        rows.append((name, roles, job.summary))
    _print(("job", "roles", "what"), rows, markdown=False)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    job = registry.get(arguments.job)
    if arguments.prompt is not None and not job.complete:
        raise UsageError(f"--prompt: {arguments.job} writes no text; leave it out")
    settings = config.load(job.settings, job=arguments.job)
    telemetry.setup_logging(settings.log_format, settings.log_level, stream=sys.stderr)
    path: Path = arguments.checkpoint
    if not path.exists():
        raise UsageError(f"--checkpoint {path}: no such file or directory")
    try:
        if path.is_dir():
            snapshot = checkpoint.Checkpoints(path, arguments.job).newest()
        else:
            snapshot = checkpoint.read(path, arguments.job)
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from error
    if snapshot is None:
        raise UsageError(f"--checkpoint {path}: holds no checkpoint")
    settings = settings.model_copy(update=snapshot.state.get("settings", {}))  # those that it depends on
    if arguments.prompt is not None:
        text = registry.resolve(job.complete)(settings, snapshot.state, arguments.prompt)
        print(json.dumps({"text": text}) if arguments.json else text)
        return 0
    result = registry.resolve(job.evaluate)(settings, snapshot.state)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{snapshot.path.name}: " + ", ".join(f"{name} {value:g}" for name, value in result.items()))
    return 0


def _print(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], markdown: bool) -> None:
    if markdown:
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        for cells in [list(head), ["---"] * len(head), *escaped]:
            print("| " + " | ".join(cells) + " |")
        return
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    # a pipe has no width; output for a program must not be cut
    Console(width=None if sys.stdout.isatty() else 240).print(table)


if __name__ == "__main__":
    sys.exit(main())
