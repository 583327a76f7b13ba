"""The command line. Without an argument: runs the rank that the environment names."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    from rich.console import Console
    from rich.table import Table

    from rolecall import config, fields, machine, manifests, new, secret, telemetry
    from rolecall.config import Settings
    from rolecall.declare import describe, flags, loader, registry, sources
    from rolecall.declare.spec import Job
    from rolecall.errors import CRASHED, USAGE, RankError, UsageError
    from rolecall.record import rundir
except KeyboardInterrupt:  # they take a moment
    raise SystemExit(130) from None

TARGET = f"{', '.join(registry.JOBS)}, FILE.py, or package.module[:NAME]"


class Command(NamedTuple):
    """A command whose module no other command imports."""

    module: str
    summary: str
    run: str = "run"  # the function that runs it with its words
    parser: str = "parser"  # the one that makes its argument parser

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the module."""
        return getattr(importlib.import_module(self.module), function)(*arguments)


COMMANDS = {
    "eval": Command("rolecall.export.evaluation", "evaluate a checkpoint"),
    "export": Command(
        "rolecall.export.exporting", "write a checkpoint's model as safetensors, ONNX or torch.export's program"
    ),
    "trace": Command(
        "rolecall.observe.trace.command", "what all ranks do and wait for, as one file for Perfetto, or as a table"
    ),
    "stacks": Command("rolecall.observe.stacks.command", "the stacks of all ranks, and who waits for whom"),
    "logs": Command("rolecall.launch.logs", "what the ranks of a run have written"),
    "fetch": Command("rolecall.launch.fetch", "where a run's summary, history and checkpoint are, or a copy of them"),
    "stop": Command("rolecall.launch.commands", "drain a local run, or end it at once", "stop", "stop_parser"),
    "debug": Command(
        "rolecall.launch.debugger", "attach the terminal to a rank of a local run: pdb, where it is stopped"
    ),
    "ps": Command("rolecall.launch.commands", "the processes of a local run, or all such runs", "ps", "ps_parser"),
    "kill": Command(
        "rolecall.launch.commands",
        "kill a rank of a local run, or a part of it, which is started again",
        "kill",
        "kill_parser",
    ),
    "scale": Command(
        "rolecall.launch.commands",
        "change how many ranks an elastic role of a local run has",
        "scale",
        "scale_parser",
    ),
    "doctor": Command("rolecall.observe.doctor.command", "check everything that a rank here needs"),
}
SHELLS = ("bash", "zsh", "fish")
RUN = """JOB is the name of one of these, FILE.py, or package.module[:NAME]:

{jobs}

`rolecall run JOB --help` lists its settings, each of which is a flag. A torch RPC program that has no job runs by
`rolecall run FILE.py:FUNCTION --ranks N`, or as __main__ by `rolecall run FILE.py --ranks N -- ARGUMENTS`, in which
{{rank}} and {{world_size}} are replaced.

`--name NAME` names the run for `rolecall watch`, `logs`, `ps`, `scale`, `kill`, `stacks`, `stop` and `fetch`; with
`--detach` it goes on when this command has ended."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 this rank crashed, 2 bad input, 3 the job failed, 4 its result is
    not saved, 130 after Ctrl-C."""
    _open_standard_streams()
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # settings name the user's modules; those of libraries come first
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["run"] and len(words) > 1 and not words[1].startswith("-"):
            return _run(words[1], words[2:])  # whose flags depend on the job
        if words and (command := COMMANDS.get(words[0])):
            code = int(command.call(command.run, words[1:]))
            sys.stdout.flush()
            return code
        arguments = argument_parser().parse_args(words)
        return int(arguments.handler(arguments))
    except UsageError as error:
        return _failed(error, USAGE)
    except RankError as error:
        return _failed(error, CRASHED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def main_of(job: Job) -> int:  # noqa: RET503 the last call does not return
    """Runs `job` with the flags of this process, as `main` does. Unless ranks are threads of it, a process of the
    command takes its place: this one has imported the job, and the zygote begins without."""
    words = sys.argv[1:]
    try:
        words = ["run", registry.target_of(job), *words]
        if flags.take_options(_split(words[2:])[0])[0].in_process:
            return main(words)
    except UsageError as error:
        return _failed(error, USAGE)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "rolecall", *words])


def _failed(error: Exception, code: int) -> int:
    """Says why this process ends, also to the program that has started the run. Returns the exit code."""
    if reasons := config.exported(config.REASONS):
        with contextlib.suppress(OSError), Path(reasons).open("r+") as file:  # not if it has been removed
            file.seek(0, os.SEEK_END)
            file.write(f"{error}\n")
    print(f"rolecall: {error}", file=sys.stderr, flush=True)
    return code


def _open_standard_streams() -> None:
    """Opens /dev/null for those that are closed (`>&-`): files opened later would take their numbers."""
    if sys.stdin and sys.stdout and sys.stderr:
        return
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def argument_parser() -> argparse.ArgumentParser:
    """The parser of the command line; the arguments of `run` and of COMMANDS have their own."""
    parser = argparse.ArgumentParser(prog="rolecall", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rolecall {config.__version__}")
    parser.set_defaults(handler=_rank, tied=0, tied_to_input=False, restarts=0)
    commands = parser.add_subparsers(metavar="COMMAND")
    rank = commands.add_parser("rank", help="run the rank that the environment names (the default)")
    rank.add_argument("--tied", type=int, default=0, metavar="PID", help="end with this parent process")
    rank.add_argument("--tied-to-input", action="store_true", help="end at the end of standard input")
    rank.add_argument("--restarts", type=int, default=0, metavar="N", help="restart it N times in a row at most")
    rank.set_defaults(handler=_rank)
    jobs = "\n".join(f"  {name:<8} {registry.get(name).summary}" for name in registry.JOBS)
    run = commands.add_parser(
        "run",
        help="run every rank of a job as a process on this machine",
        description=RUN.format(jobs=jobs),
        usage="rolecall run JOB [--on ENGINE] [--name NAME] [--detach] [--in-process] [--plain] [--SETTING VALUE]...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("job", metavar="JOB", help=TARGET)
    run.set_defaults(handler=lambda arguments: _run(arguments.job, ()))
    describe = commands.add_parser("describe", help="describe a job with its settings filled in")
    describe.add_argument("job", metavar="JOB", help=TARGET)
    describe.add_argument("arguments", nargs=argparse.REMAINDER, help="its flags")
    describe.add_argument("--ranks", action="store_true", help="print the world size alone")
    describe.add_argument("--variables", action="store_true", help="print the names of its own variables alone")
    describe.add_argument("--output", type=Path, metavar="FILE", help="write the description to a file")
    describe.set_defaults(handler=_describe)
    watch = commands.add_parser("watch", help="the live display of a job that runs anywhere, from its rank 0")
    watch.add_argument(
        "target",
        metavar="TARGET",
        help=f"{rundir.A_RUN}; or a port, host:port or URL of rank 0's METRICS_PORT",
    )
    watch.add_argument("--plain", action="store_true", help="lines instead of the live display")
    watch.add_argument("--once", action="store_true", help="display the ranks once, and end")
    watch.add_argument("--timeout", type=_seconds, default=30.0, help="seconds without an answer to end after (30)")
    watch.set_defaults(handler=_watch)
    for name, listed, handler in (("config", "variables", _config), ("metrics", "metrics", _metrics)):
        lists = commands.add_parser(name, help=f"list the {listed}")
        lists.add_argument("job", nargs="?", metavar="JOB", help=TARGET)
        lists.add_argument("--markdown", action="store_true", help="as a Markdown table")
        lists.set_defaults(handler=handler)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)  # whose arguments are not parsed here
    resume = commands.add_parser("resume", help="let a job that has failed for good train on at its next start")
    resume.add_argument(
        "run", nargs="?", metavar="RUN", help=f"{rundir.A_RUN} (default: CHECKPOINT_DIR of the environment)"
    )
    resume.set_defaults(handler=_resume)
    create = commands.add_parser(
        "new", help="write a job to start from: its file, a test, compose.yaml, a kustomization"
    )
    create.add_argument("name", metavar="NAME", help="of the folder, which is made here, and of the job")
    create.set_defaults(handler=_new)
    write = commands.add_parser("manifests", help="write the kustomizations of a built-in job, for Kubernetes")
    write.add_argument("job", metavar="JOB", help=f"{', '.join(manifests.JOBS)} (a job file of your own)")
    write.add_argument("--output", type=Path, default=Path("k8s"), metavar="DIRECTORY", help="where to write (k8s)")
    write.set_defaults(handler=_manifests)
    complete = commands.add_parser("completion", help="print the completion of commands, jobs and settings for a shell")
    complete.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    complete.set_defaults(handler=_completion)
    commands.add_parser("token", help="make a token for JOB_TOKEN or JOB_TOKEN_FILE").set_defaults(handler=_token)
    commands.add_parser("jobs", help="list the jobs and their roles").set_defaults(handler=_jobs)
    return parser


def _rank(arguments: argparse.Namespace) -> int:
    from rolecall.rank import termination  # here and below: other commands start without it

    try:
        return _run_rank(arguments)
    except (UsageError, RankError) as error:
        termination.write(f"rolecall: {error}")
        raise


def _run_rank(arguments: argparse.Namespace) -> int:
    from rolecall.rank import fork_server, guard, zygote

    secret.forbid_core_dumps()
    tied = os.dup(0) if arguments.tied_to_input else 0
    if tied:  # the rank's other processes read nothing
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    source = {} if config.exported(config.SOURCES) else registry.sources_of(config.job_name())
    with sources.passed_on(source):
        job, settings = describe.of_rank(config.job_name()), config.load(Settings)
    if job.target == registry.SCRIPT and not config.exported(config.SOURCES):
        source = registry.sources_of(job.settings["script"])
    config.forget("JOB_TOKEN")  # what this process starts has no need of it
    if not settings.role and settings.rank is None and (number := config.outside_step()):
        raise UsageError(
            f"SLURM_JOB_ID={number}: srun has not started this rank; run `srun rolecall rank`, or set ROLE"
        )
    identity = registry.identity(job.roles, settings, config.host_name())
    telemetry.setup_logging(
        settings.log_format, settings.log_level, role=identity.role or None, ordinal=identity.ordinal
    )
    telemetry.warn_misspelt({*Settings.model_fields, *job.variables})
    machine.name_process(job.name, identity.role, identity.ordinal, "guard" if arguments.restarts else "supervisor")
    parent = zygote.parent or arguments.tied or (arguments.restarts and os.getpid())
    if arguments.restarts and (code := guard.guard(arguments.restarts)) is not None:
        return code
    if settings.token_replaced():  # before the first process forked this one, perhaps after others
        settings = config.load(Settings)
    with sources.passed_on(source):
        if loader.is_file(job.target):
            place = Path(loader.split(job.target)[0])
            loader.add_folder(place if place.is_dir() else place.parent)  # `preload` may name a module beside the file
        fork_server.prepare(job.preload(identity.role), imported=bool(zygote.parent))  # imports torch meanwhile
        from rolecall.rank import start

        run = arguments.tied or int(arguments.tied_to_input)
        return start.run(job, settings, identity, run, parent, tied=tied)


def _run(target: str, words: Sequence[str]) -> int:
    from rolecall.rank import descendants
    from rolecall.rank.zygote import Zygote

    secret.forbid_core_dumps()
    given, values = _split(words)
    directory, is_detached, others = flags.take_name(given)
    options, given = flags.take_options(others)
    if options.tied:
        descendants.exit_with(options.tied)
    if is_detached and not {"-h", "--help"} & set(given):
        from rolecall.launch import detached

        if options.in_process:
            raise UsageError("--detach: commands reach no run in one process; leave --in-process out")
        return detached.run(target, directory, [*others, *values])
    if directory:
        given.append(f"--checkpoint-dir={directory}")
    target, words = registry.program(target, [*given, *values])
    registry.require_target(target)
    if options.is_submitted and not {"-h", "--help"} & set(given):
        from rolecall.launch import clusters

        with sources.passed_on(registry.sources_of(target)):
            return clusters.run(target, words, options)
    if options.engine != flags.LOCAL and not {"-h", "--help"} & set(given):
        from rolecall.launch import on_hosts

        with sources.passed_on(registry.sources_of(target)):
            return on_hosts.run(target, words, options)
    if options.in_process:
        from rolecall.launch import in_process

        return in_process.run(target, words)
    # the zygote imports torch while this process imports the rest
    with sources.passed_on(registry.sources_of(target)), Zygote(target) as zygote:
        from rolecall.launch import local

        job = describe.ask(target, words, zygote.call)
        registry.require_extra(job.target)
        with sources.passed_on(registry.sources_of(job.settings["script"]) if target == registry.SCRIPT else {}):
            return local.run(job, zygote)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes before the first `--`, and what begins with it."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end]], [*words[end:]]


def _resume(arguments: argparse.Namespace) -> int:
    directory = rundir.find(arguments.run) if arguments.run else config.load(Settings).checkpoint_dir
    if not directory.is_dir():
        raise UsageError(f"{directory}: there is no such folder; name the CHECKPOINT_DIR of rank 0")
    failed = rundir.read_failed(directory)
    if failed is None:
        print(f"{directory}: no job has failed for good here; start its ranks to resume it")
        return 0
    rundir.forget_failed(directory)
    reason = telemetry.cause(failed.reason).get("cause", "")
    print(f"{directory}: forgot that the job failed ({reason}); start its ranks, or restart those that still run")
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    from rolecall.rank import descendants, zygote

    if zygote.parent:
        descendants.exit_with(zygote.parent)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is no part of the answer
        registry.get(arguments.job)
    job = describe.describe(arguments.job, arguments.arguments)
    if arguments.output:
        arguments.output.write_text(job.to_json())
    elif arguments.ranks:
        print(job.ranks)
    elif arguments.variables:
        print("\n".join(job.variables))
    else:
        print(job.to_json())
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from rolecall.observe import watch

    return watch.run(arguments.target, arguments.plain, arguments.once, arguments.timeout)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _config(arguments: argparse.Namespace) -> int:
    settings = registry.get(arguments.job).settings if arguments.job else Settings
    _print(("variable", "type", "default", "bounds", "meaning"), fields.variables(settings), arguments.markdown)
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    of_job = registry.get(arguments.job).metrics if arguments.job else ()
    _print(("metric", "kind", "labels", "where", "meaning"), telemetry.catalogue(of_job), arguments.markdown)
    return 0


def _jobs(arguments: argparse.Namespace) -> int:
    rows = []
    for name in registry.JOBS:
        job = registry.get(name)
        roles = ", ".join(role.name + (f" x {role.count}" if role.count != 1 else "") for role in job.roles)
        rows.append((name, roles, job.summary))
    _print(("job", "roles", "what"), rows, markdown=False)
    return 0


def _token(_: argparse.Namespace) -> int:
    from rolecall.tunnel import keys

    print(keys.new_token())
    return 0


def _new(arguments: argparse.Namespace) -> int:
    files = new.write(arguments.name, Path.cwd())
    print(f"rolecall: wrote {', '.join(str(file.relative_to(Path.cwd())) for file in files)}")
    print(f"try: rolecall run {files[0].parent.name}/{arguments.name}.py    pytest {arguments.name}")
    return 0


def _manifests(arguments: argparse.Namespace) -> int:
    folder, files = manifests.write(arguments.job, arguments.output)
    print(f"rolecall: wrote {len(files)} files to {arguments.output}")
    print(f"try: rolecall token | kubectl create secret generic {folder.name} --from-file=JOB_TOKEN=/dev/stdin")
    print(f"     kubectl apply -k {folder}    the comments in its kustomization.yaml say what is needed before it")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from rolecall import completion

    parsers = {name: command.call(command.parser) for name, command in COMMANDS.items()}
    print(completion.script(arguments.shell, argument_parser(), parsers))
    return 0


def _print(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], markdown: bool) -> None:
    if markdown:
        escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
        for cells in [list(head), ["---"] * len(head), *escaped]:
            print("| " + " | ".join(cells) + " |")
        return
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    # a pipe has no width; output for a program must not be cut
    Console(width=None if sys.stdout.isatty() else 240).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] != ["describe"]:
        sys.exit(main())
    gc.disable()  # a short process that imports torch, of which collections take a tenth of the time
    code = main()
    with contextlib.suppress(BrokenPipeError):  # the reader of the output has gone
        sys.stdout.flush()
    os._exit(code)  # at its exit, an interpreter tears torch down, slowly
