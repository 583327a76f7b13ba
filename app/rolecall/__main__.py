"""The command line. Without an argument: be the rank that the environment names."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import USAGE
from rolecall.job import checkpoint, registry


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 the job failed, 2 bad input."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"rolecall: {error}", file=sys.stderr, flush=True)
        return USAGE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rolecall", description=__doc__)
    parser.set_defaults(run=_rank, tied=False)
    commands = parser.add_subparsers(metavar="COMMAND")
    rank = commands.add_parser("rank", help="be the rank that the environment names (the default)")
    rank.add_argument("--tied", action="store_true", help="end with the process that started this one")
    rank.set_defaults(run=_rank)
    local = commands.add_parser("local", help="run every rank of a job as a process on this machine")
    local.add_argument("job", choices=registry.JOBS)
    local.add_argument("--plain", action="store_true", help="lines instead of the live display")
    for name in registry.counts():
        local.add_argument(f"--{name.lower().replace('_', '-')}", dest=name, metavar="N", help=f"the variable {name}")
    local.set_defaults(run=_local)
    watch = commands.add_parser("watch", help="the live display of ranks that run anywhere, from their metrics")
    watch.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="a port, host:port or URL of a rank's metrics, or a local run's folder",
    )
    watch.add_argument("--plain", action="store_true", help="lines instead of the live display")
    watch.add_argument("--once", action="store_true", help="show what there is once, and end")
    watch.add_argument("--timeout", type=_seconds, default=30.0, help="seconds without any answer to end after (30)")
    watch.set_defaults(run=_watch)
    show = commands.add_parser("config", help="list the variables")
    show.add_argument("job", nargs="?", choices=registry.JOBS)
    show.add_argument("--markdown", action="store_true", help="as a Markdown table")
    show.set_defaults(run=_config)
    metrics = commands.add_parser("metrics", help="list the metrics")
    metrics.add_argument("job", nargs="?", choices=registry.JOBS)
    metrics.add_argument("--markdown", action="store_true", help="as a Markdown table")
    metrics.set_defaults(run=_metrics)
    evaluate = commands.add_parser("eval", help="evaluate a checkpoint")
    evaluate.add_argument("job", choices=registry.JOBS)
    evaluate.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or a directory of them")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument("--prompt", metavar="TEXT", help="have the model continue TEXT instead (rnn)")
    evaluate.set_defaults(run=_evaluate)
    commands.add_parser("jobs", help="list the jobs and their roles").set_defaults(run=_jobs)
    return parser


def _rank(arguments: argparse.Namespace) -> int:
    from rolecall.rank import supervisor

    job, settings = registry.load()
    identity = registry.identity(job, settings, config.host_name())
    telemetry.setup_logging(settings.log_format, settings.log_level, role=identity.role, ordinal=identity.ordinal)
    warn_misspelt(job.settings)
    return supervisor.run(job, settings, identity, arguments.tied)


def warn_misspelt(settings: type[Settings]) -> None:
    for name, meant in config.misspelt(settings):
        telemetry.log().warning("a variable looks misspelt and has no effect", variable=name, meant=meant)


def _local(arguments: argparse.Namespace) -> int:
    from rolecall.watch import local

    counts = {name: getattr(arguments, name) for name in registry.counts() if getattr(arguments, name) is not None}
    return local.run(arguments.job, counts, arguments.plain)


def _watch(arguments: argparse.Namespace) -> int:
    from rolecall.watch import command

    return command.run(arguments.targets, arguments.plain, arguments.once, arguments.timeout)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


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
            found = checkpoint.Checkpoints(path, arguments.job).newest()
        else:
            found = checkpoint.read(path, arguments.job)
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from error
    if found is None:
        raise UsageError(f"--checkpoint {path}: holds no checkpoint")
    settings = settings.model_copy(update=found.state.get("settings", {}))  # those that the checkpoint depends on
    if arguments.prompt is not None:
        text = registry.resolve(job.complete)(settings, found.state, arguments.prompt)
        print(json.dumps({"text": text}) if arguments.json else text)
        return 0
    result = registry.resolve(job.evaluate)(settings, found.state)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{found.path.name}: " + ", ".join(f"{name} {value:g}" for name, value in result.items()))
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
    # a pipe has no width of its own; do not cut what is read by a program
    Console(width=None if sys.stdout.isatty() else 240).print(table)


if __name__ == "__main__":
    sys.exit(main())
