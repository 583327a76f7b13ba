"""`rolecall launch slurm JOB`: writes and submits the batch script of a job, whose ranks are the tasks of one srun."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import describe, flags, registry, sources
from rolecall.declare.describe import Description
from rolecall.errors import UsageError

SCRIPT_FILE, TOKEN_FILE = "job.sh", "job-token"  # in CHECKPOINT_DIR
LEFT = 75  # exit code of ranks that leave before the job's end: EX_TEMPFAIL
RESTARTS = 5  # of a rank that crashes, in a row
DRAIN_SECONDS = 60  # before the time limit
SUBMIT_SECONDS = 60.0  # for sbatch to answer


@dataclass(frozen=True)
class Resources:
    """Options of sbatch: `common` for the whole job; `roles`, by role, each for a component of a heterogeneous job."""

    common: Sequence[str]
    roles: Mapping[str, Sequence[str]]


def parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall launch`."""
    parser = argparse.ArgumentParser(
        prog="rolecall launch",
        description="Writes a batch script, in which each rank is a task, to CHECKPOINT_DIR and submits it. A setting "
        "of the job is a flag, as of `rolecall run`.",
        usage="rolecall launch slurm JOB [--nodes N] [--role ROLE=OPTIONS]... [--sbatch OPTIONS]... [--dry-run] "
        "[--SETTING VALUE]...",
        allow_abbrev=False,
    )
    parser.add_argument("scheduler", choices=["slurm"])
    parser.add_argument("job", metavar="JOB", help="as of `rolecall run`; all nodes must see its file")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes for the ranks (default: Slurm decides)")
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE=OPTIONS",
        help="options of sbatch for the ranks of one role, such as observer='--cpus-per-task=4 --mem=8G'; each role is "
        "then a component of a heterogeneous job",
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTIONS", help="further options, such as '--time=2:00:00'"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script; neither write nor submit it")
    return parser


def run(words: Sequence[str]) -> int:
    """Runs the command with `words`. Returns the exit code. Raises UsageError for wrong settings, and if sbatch is
    missing or refuses the job."""
    end = words.index("--") if "--" in words else len(words)
    arguments, settings = parser().parse_known_args(words[:end])
    job = _describe(arguments.job, [*settings, *words[end:]])
    resources = Resources(_common(arguments, job), _by_role(arguments.role, job))
    directory, variables = _variables(job)
    script = batch_script(job, variables, resources)
    if arguments.dry_run:
        print(script, end="")
        return 0
    path = _write(directory, script)
    number = _submit(path)
    print(f"rolecall: submitted job {number}; checkpoints and script in {directory}, output in slurm-{number}.out")
    return 0


def _describe(target: str, words: Sequence[str]) -> Description:
    target, given = registry.program(target, words)
    registry.require_target(target)
    with sources.passed_on(registry.sources_of(target)):
        return describe.ask(target, given)


def _common(arguments: argparse.Namespace, job: Description) -> list[str]:
    """The options for every component. Raises UsageError for a number of nodes that cannot be."""
    options = [_options(text, "--sbatch") for text in arguments.sbatch]
    if arguments.nodes is None:
        return options
    if arguments.role:
        raise UsageError("--nodes: with --role, name the nodes of each role, such as --role observer=--nodes=2")
    if not 1 <= arguments.nodes <= job.ranks:
        raise UsageError(f"--nodes={arguments.nodes}: the job has {job.ranks} ranks, at least one on each node")
    return [f"--nodes={arguments.nodes}", *options]


def _by_role(given: Sequence[str], job: Description) -> dict[str, list[str]]:
    """The options for each role, by role; empty if there are none for any. Raises UsageError."""
    names, options = [role.name for role in job.roles], dict[str, list[str]]()
    for text in given:
        name, _, rest = text.partition("=")
        if name not in names:
            raise UsageError(f"--role={text}: no role {name!r} in {job.name} ({', '.join(names)})")
        options.setdefault(name, []).append(_options(rest, f"--role={name}"))
    return {name: options.get(name, []) for name in names} if options else {}


def _options(text: str, flag: str) -> str:
    """`text`, which are options of sbatch for one line of the script. Raises UsageError if it is none."""
    if not text.startswith("-") or not text.isprintable():
        raise UsageError(f"{flag}={text!r}: is no option of sbatch, such as --time=2:00:00")
    return text


def _variables(job: Description) -> tuple[Path, dict[str, str]]:
    """CHECKPOINT_DIR, and the variables of every rank: the settings that the environment and the flags give."""
    names = [name.upper() for name in Settings.model_fields if name not in flags.NO_FLAG]
    given = {name: config.exported(name) for name in (*names, *job.variables) if config.exported(name)}
    given = {name: value for name, value in given.items() if name.lower() not in job.secrets} | job.flags
    settings = config.load(
        Settings, **{name.lower(): value for name, value in given.items() if name.lower() in Settings.model_fields}
    )
    if settings.token and settings.job_token_file is None:
        raise UsageError(
            "JOB_TOKEN: Slurm keeps the environment of a job in files and perhaps in a database; write the token to a "
            "file of mode 0600 that all nodes see, and name it by JOB_TOKEN_FILE"
        )
    stamp = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory = Path(given.get("CHECKPOINT_DIR") or Path("runs") / stamp).absolute()
    variables = {**given, "JOB": job.target, "CHECKPOINT_DIR": str(directory), "LEAVE_CODE": str(LEFT)}
    if settings.secure and settings.tls_cert is None:
        variables["JOB_TOKEN_FILE"] = str((settings.job_token_file or directory / TOKEN_FILE).absolute())
    return directory, variables


def batch_script(job: Description, variables: Mapping[str, str], resources: Resources) -> str:
    """The script, whose ranks have `variables`."""
    python = [sys.executable, "-P", "-m", "rolecall"]  # -P: no module of the folder may replace one of a library
    rank = shlex.join([*python, "rank", "--restarts", str(RESTARTS)])
    lines = ["#!/bin/bash", *_head(job, resources), "set -eu"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += ['mkdir -p "$CHECKPOINT_DIR"']
    if "JOB_TOKEN_FILE" in variables:
        lines += [
            "# the ranks' shared secret, which this user alone may read",
            f'[ -s "$JOB_TOKEN_FILE" ] || (umask 077 && {shlex.join(python)} token > "$JOB_TOKEN_FILE")',
        ]
    lines += [
        "# if Slurm starts the job again, it resumes",
        '[ -z "${SLURM_RESTART_COUNT:-}" ] || export RESUME=1',
        "code=0",
        _srun(rank, job, resources),
        "# ranks that left before the job's end, such as at its time limit, have saved",
        f'if [ "$code" = {LEFT} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    return "\n".join([*lines, ""])


def _head(job: Description, resources: Resources) -> list[str]:
    """The options of sbatch; those of a heterogeneous job for each component."""
    shared = [
        f"--job-name={shlex.quote(job.name)}",
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{DRAIN_SECONDS}",
    ]
    shared += resources.common
    parts = [[f"--ntasks={job.ranks}", *shared]]
    if resources.roles:
        parts = [[f"--ntasks={role.count}", *shared, *resources.roles[role.name]] for role in job.roles]
    lines = [[f"#SBATCH {option}" for option in part] for part in parts]
    return [line for number, part in enumerate(lines) for line in (["#SBATCH hetjob"] * (number > 0) + part)]


def _srun(rank: str, job: Description, resources: Resources) -> str:
    """The command that starts all ranks. A rank that ends does not end the others; srun takes the CPUs of a task from
    no option of sbatch."""
    srun = "srun --kill-on-bad-exit=0 --wait=0 --export=ALL"
    cpus = "${{SLURM_CPUS_PER_TASK{0}:+--cpus-per-task=$SLURM_CPUS_PER_TASK{0}}}"
    if not resources.roles:
        return f"{srun} {cpus.format('')} {rank} || code=$?"
    parts = [f"--het-group={n} {cpus.format(f'_HET_GROUP_{n}')} {rank}" for n in range(len(job.roles))]
    return f"{srun} {' : '.join(parts)} || code=$?"


def _write(directory: Path, script: str) -> Path:
    path = directory / SCRIPT_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    except OSError as error:
        raise UsageError(f"CHECKPOINT_DIR={directory}: cannot be written ({error.strerror})") from error
    return path


def _submit(script: Path) -> str:
    """Submits the script. Returns the number of the job. Raises UsageError."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SUBMIT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("sbatch: no such program; run this on a node of a Slurm cluster, or with --dry-run") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"sbatch: has not answered for {SUBMIT_SECONDS:g} s; is slurmctld up?") from None
    if done.returncode:
        raise UsageError(f"sbatch {script}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
