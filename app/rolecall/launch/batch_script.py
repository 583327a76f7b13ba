"""The batch script of a job on Slurm, whose ranks `on_batch_host` starts."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import flags
from rolecall.declare.describe import Description, Needs
from rolecall.declare.flags import RunOptions
from rolecall.errors import UsageError

TOKEN_FILE, CODE_FILE, DRAINING = "job-token", "slurm-exit-code", "slurm-draining"  # in CHECKPOINT_DIR
LEFT = 75  # exit code of ranks that leave before the job's end: EX_TEMPFAIL
RESTARTS = 5  # of a rank that crashes, in a row
DRAIN_SECONDS = 60  # before the time limit
MEMORY = re.compile(r"--mem(-per-[cg]pu)?[= ]")


@dataclass(frozen=True)
class Resources:
    """Options of sbatch: `common` for the whole job; `roles`, by role, each for a component of a heterogeneous job."""

    common: Sequence[str]
    roles: Mapping[str, Sequence[str]]


def resources(options: RunOptions, job: Description) -> Resources:
    """What the flags and the job's roles ask for. Raises UsageError."""
    common = [_options(text, "--sbatch") for text in options.sbatch]
    roles = _by_role(options.roles, job, common)
    if len(roles) == 1:  # srun knows no components of such a job
        common, roles = [*common, *roles[job.roles[0].name]], {}
    if options.nodes is None:
        return Resources(common, roles)
    if roles:
        raise UsageError(
            "--nodes: roles have options or needs of their own: name the nodes of each, such as --role ROLE=--nodes=2"
        )
    if not 1 <= options.nodes <= job.ranks:
        raise UsageError(f"--nodes={options.nodes}: the job has {job.ranks} ranks, at least one on each node")
    return Resources([f"--nodes={options.nodes}", *common], roles)


def _by_role(given: Sequence[str], job: Description, common: Sequence[str]) -> dict[str, list[str]]:
    """The options for each role besides `common` ones, by role; empty if there are none for any. Raises UsageError."""
    texts: dict[str, list[str]] = {name: [] for name in job.needs}
    for text in given:
        name, _, rest = text.partition("=")
        if name not in texts:
            raise UsageError(f"--role={text}: no role {name!r} in {job.name} ({', '.join(texts)})")
        texts[name].append(_options(rest, f"--role={name}"))
    options = {
        name: _of_needs(needs, " ".join([*common, *texts[name]])) + texts[name] for name, needs in job.needs.items()
    }
    return options if any(options.values()) else {}


def _of_needs(needs: Needs, text: str) -> list[str]:
    """The options for `needs`, beside those in `text`: sbatch refuses two of its options for memory."""
    cpus = math.ceil(needs.cpus or 1)
    options = [f"--cpus-per-task={cpus}"] if needs.cpus else []
    if needs.memory_mb and not MEMORY.search(text):
        options.append(f"--mem-per-cpu={math.ceil(needs.memory_mb * 10**6 / 2**20 / cpus)}M")
    return options + ([f"--gpus-per-task={needs.gpus}"] if needs.gpus else [])


def _options(text: str, flag: str) -> str:
    """`text`, which are options of sbatch for one line of the script. Raises UsageError if it is none."""
    if not text.startswith("-") or not text.isprintable():
        raise UsageError(f"{flag}={text!r}: is no option of sbatch, such as --time=2:00:00")
    return text


def variables(job: Description, settings: Settings, directory: Path) -> dict[str, str]:
    """The variables of every rank: the settings that the environment and the flags give. Raises UsageError."""
    names = [name.upper() for name in Settings.model_fields if name not in flags.NO_FLAG]
    given = {name: config.exported(name) for name in (*names, *job.variables) if config.exported(name)}
    given = {name: value for name, value in given.items() if name.lower() not in job.secrets} | job.flags
    if settings.token and settings.job_token_file is None:
        raise UsageError(
            "JOB_TOKEN: Slurm keeps the environment of a job in files and perhaps in a database; write the token to a "
            "file of mode 0600 that all nodes see, and name it by JOB_TOKEN_FILE"
        )
    given |= {"JOB": job.target, "CHECKPOINT_DIR": str(directory), "LEAVE_CODE": str(LEFT)}
    if settings.secure and settings.tls_cert is None:
        given["JOB_TOKEN_FILE"] = str((settings.job_token_file or directory / TOKEN_FILE).absolute())
    return given


def output_file(directory: Path, number: str = "%j") -> Path:
    """What all ranks of the job `number` write, each line after the number of its task."""
    return directory / f"slurm-{number}.out"


def batch_script(job: Description, variables: Mapping[str, str], resources: Resources) -> str:
    """The script, whose ranks have `variables`."""
    python = [sys.executable, "-P", "-m", "rolecall"]  # -P: no module of the folder may replace one of a library
    rank = shlex.join([*python, "rank", "--restarts", str(RESTARTS)])
    lines = ["#!/bin/bash", *_head(job, resources, Path(variables["CHECKPOINT_DIR"])), "set -eu"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f'mkdir -p "$CHECKPOINT_DIR" && rm -f "$CHECKPOINT_DIR/{CODE_FILE}"']
    if "JOB_TOKEN_FILE" in variables:
        lines += [
            "# the ranks' shared secret, which this user alone may read",
            f'[ -s "$JOB_TOKEN_FILE" ] || (umask 077 && {shlex.join(python)} token > "$JOB_TOKEN_FILE")',
        ]
    lines += [
        "# if Slurm starts the job again, it resumes",
        '[ -z "${SLURM_RESTART_COUNT:-}" ] || export RESUME=1',
        "code=0",
        f'if [ -e "$CHECKPOINT_DIR/{DRAINING}" ]; then code={LEFT}; else',  # there was no rank to signal
        _srun(rank, job, resources),
        "fi",
        "# ranks that left before the job's end, such as at its time limit, have saved",
        f'if [ "$code" = {LEFT} ] && ! [ -e "$CHECKPOINT_DIR/{DRAINING}" ]; then scontrol requeue "$SLURM_JOB_ID"',
        f'else echo "$code" > "$CHECKPOINT_DIR/{CODE_FILE}"; fi',
        'exit "$code"',
    ]
    return "\n".join([*lines, ""])


def _head(job: Description, resources: Resources, directory: Path) -> list[str]:
    """The options of sbatch; those of a heterogeneous job for each component."""
    shared = [
        f"--job-name={shlex.quote(job.name)}",
        f"--output={shlex.quote(str(output_file(directory)))}",
        "--requeue",
        "--no-kill",  # a lost node takes its ranks alone
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
    """The command that starts all ranks, which are fewer than the job's tasks if it has room to spare: srun takes the
    CPUs of a task from no option of sbatch."""
    start = shlex.join([sys.executable, "-P", "-m", "rolecall.launch.on_batch_host"])
    numbers = ",".join(f"$SLURM_JOB_ID_HET_GROUP_{n}" for n in range(len(job.roles)))
    start += f' "{numbers if resources.roles else "$SLURM_JOB_ID"}" "$SLURMD_NODENAME"'
    cpus = "${{SLURM_CPUS_PER_TASK{0}:+--cpus-per-task=$SLURM_CPUS_PER_TASK{0}}}"
    if not resources.roles:
        return f"{start} --ntasks={job.ranks} {cpus.format('')} -- {rank} || code=$?"
    parts = [
        f"--het-group={n} --ntasks={role.count} {cpus.format(f'_HET_GROUP_{n}')} -- {rank}"
        for n, role in enumerate(job.roles)
    ]
    return f"{start} {' : '.join(parts)} || code=$?"
