"""`rolecall run JOB --on slurm`: a run whose ranks are tasks of a job of Slurm, on nodes that see its directory."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rolecall import placement
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.flags import SLURM, RunOptions
from rolecall.errors import CRASHED, UsageError
from rolecall.gang.protocol import name_of
from rolecall.launch import batch_script, here
from rolecall.launch.followed import Seen
from rolecall.messages.control import ListedRank
from rolecall.record import rundir

SCRIPT_FILE, NUMBER_FILE = "job.sh", "slurm-job"  # in the run's directory
COMMAND_SECONDS = 60.0  # for a command of Slurm's to answer
SETTLE_SECONDS = 10.0  # for the exit code to be seen on a shared file system, once the job is over
POLL_SECONDS = 0.5  # between two looks at the output, or for the ranks' step
STEP_SECONDS = 30.0  # from a job's start to that of its ranks
READ_BYTES = 2**20  # of the output at once
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
UNKNOWN = "slurm"  # in the place of a rank, for lines that no task has written


class Slurm:
    """The job of one run, in `directory`. See `followed.Cluster`. Raises UsageError for options that cannot be."""

    engine = SLURM

    def __init__(self, job: Description, settings: Settings, options: RunOptions, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._variables = batch_script.variables(job, settings, directory)
        self._resources = batch_script.resources(options, job)
        self.token_file = self._variables.get("JOB_TOKEN_FILE", "")
        self._ranks = [(role.name, ordinal) for role in job.roles for ordinal in range(role.count)]  # by task
        self._number, self._over_since, self._is_over = "", 0.0, False
        self._node, self._address = "", ""  # the first node

    def manifest(self) -> str:
        """See `Cluster`: the batch script."""
        return batch_script.batch_script(self._job, self._variables, self._resources)

    async def submit(self) -> str:
        """See `Cluster`."""
        with contextlib.suppress(OSError):
            self._number = (self._directory / NUMBER_FILE).read_text().strip()
        if self._number and not (self._directory / batch_script.CODE_FILE).exists():
            state, *_ = await self._state()
            if state in (*WAITING, *RUNNING):
                for log in (self._directory / "logs").glob("*.log"):
                    log.unlink()  # they are written anew
                return f"follows job {self._number} of Slurm, which is {state.lower()}"
        script = self._directory / SCRIPT_FILE
        with UsageError.wrap(f"CHECKPOINT_DIR={self._directory}: cannot be written", OSError):
            for name in (batch_script.CODE_FILE, batch_script.DRAINING):
                (self._directory / name).unlink(missing_ok=True)
            script.write_text(self.manifest())
        try:
            said = await _slurm("sbatch", "--parsable", str(script))
        except UsageError:
            script.unlink()
            raise
        self._number = said.splitlines()[-1].partition(";")[0]
        rundir.write_atomically(self._directory / NUMBER_FILE, f"{self._number}\n".encode())
        return f"submitted job {self._number} of Slurm; its script and output are in {self._directory}"

    async def look(self) -> Seen:
        """See `Cluster`."""
        if (code := self._code()) is not None:
            self._is_over = True
            return Seen(code=code)
        state, reason, node, components = await self._state()
        waits = f"{state.lower()} ({reason})" if state in WAITING else ""
        ranks = tuple(
            ListedRank(role, ordinal, 0, waits or state.lower(), components[self._component(role)][1])
            for role, ordinal in self._ranks
        )
        if waits:
            return Seen(ranks, f"job {self._number} of Slurm is {waits}")
        if state in RUNNING:
            self._over_since = 0.0
            return Seen(ranks, url=await self._url(node))
        now = asyncio.get_running_loop().time()
        self._over_since = self._over_since or now
        if now - self._over_since < SETTLE_SECONDS:
            return Seen()
        self._is_over = True
        what = state.lower().replace("_", " ") or "unknown to Slurm"
        return Seen(code=CRASHED, reason=f"job {self._number} of Slurm is {what}; the same command resumes it")

    def _code(self) -> int | None:
        """What the script has ended with; None if it has not."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._directory / batch_script.CODE_FILE).read_text())
        return None

    def _component(self, role: str) -> int:
        """The number of the component that has a role's ranks; 0 if the job is not heterogeneous."""
        return [*self._resources.roles].index(role) if self._resources.roles else 0

    async def _state(self) -> tuple[str, str, str, list[tuple[str, str]]]:
        """The job's state, the reason for it, its first node, and the number and the nodes of each component; the state
        is empty if Slurm has forgotten the job."""
        try:
            said = await _slurm(
                *("squeue", "--noheader", "--states=all", "--sort=i"),
                *(f"--jobs={self._number}", "--format=%T|%r|%B|%A|%N"),
            )
        except UsageError as error:
            if "Invalid job id" not in str(error):
                raise
            said = ""
        parts = [line.split("|") for line in said.splitlines() if line.count("|") == 4]
        state, reason, node, *_ = parts[0] if parts else [""] * 3
        components = [(number, nodes) for *_, number, nodes in parts]
        missing = max(1, len(self._resources.roles)) - len(components)
        return state, reason, node, components + [("", "")] * missing

    async def _url(self, node: str) -> str:
        """Where rank 0 serves its metrics."""
        if not node:
            return ""
        if node != self._node:
            said = await _slurm("scontrol", "show", "node", node, "--oneliner")
            words = dict(word.split("=", 1) for word in said.split() if "=" in word)
            self._node, self._address = node, words.get("NodeAddr", node)
        port = self._variables.get("METRICS_PORT") or placement.rank0_metrics_port(int(self._number))
        return f"http://{self._address}:{port}/metrics"

    async def written(self) -> AsyncIterator[tuple[str, bytes]]:
        """See `Cluster`: each line of the output begins with the number of its task."""
        path, position, rest = batch_script.output_file(self._directory, self._number), 0, b""
        while True:
            is_last, data = self._is_over, b""
            with (
                UsageError.wrap(f"{path}: cannot be read", OSError),
                contextlib.suppress(FileNotFoundError),
                path.open("rb") as file,
            ):
                file.seek(position)
                data = file.read(READ_BYTES)
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield self._split(line)
            if is_last and not data:
                return
            await asyncio.sleep(0.0 if data else POLL_SECONDS)

    def _split(self, line: bytes) -> tuple[str, bytes]:
        label, divider, text = line.partition(b": ")
        task = int(label) if divider and label.strip().isdigit() else -1
        if 0 <= task < len(self._ranks):
            return name_of(self._ranks[task]), text + b"\n"
        return UNKNOWN, line + b"\n"

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        """See `Cluster`: on each node of the rank's role, a task looks for its processes."""
        state, _, _, components = await self._state()
        if state != "RUNNING":
            raise UsageError(f"job {self._number} of Slurm is {state.lower()}: no rank has a process")
        component = self._component(role)
        number, nodes = components[component]
        count = len([*placement.hosts(nodes)])
        groups = [f"--het-group={component}"] if self._resources.roles else []
        said = await _slurm(
            *("srun", f"--jobid={self._number}", *groups, "--overlap"),
            *("--ntasks-per-node=1", f"--nodes={count}", f"--ntasks={count}"),
            *(sys.executable, "-P", "-m", "rolecall.launch.on_node", number),
            *(self._job.name, name_of((role, ordinal)), part),
        )
        killed = [line for line in said.splitlines() if line.startswith("killed ")]
        if not killed:
            raise UsageError(f"{name_of((role, ordinal))}: has no process {part!r} on {nodes}")
        return "; ".join(killed)

    async def scale(self, role: str, count: int) -> str:
        """See `Cluster`: it cannot."""
        raise UsageError(
            f"{role}={count}: the number of tasks of a Slurm job is fixed; `rolecall stop` the run, and start it with "
            "the same --name and another count"
        )

    async def end(self, now: bool) -> None:
        """See `Cluster`: SIGTERM has ranks save and leave; a job that waits is cancelled."""
        (self._directory / batch_script.DRAINING).touch()  # it is not to be started again
        if now:
            state, *_ = await self._state()
            if state in RUNNING:
                await _slurm("scancel", "--signal=KILL", "--full", self._number)
            await _slurm("scancel", self._number)
            return
        try:
            async with asyncio.timeout(STEP_SECONDS):
                while True:
                    state, *_ = await self._state()
                    if state not in RUNNING or await self._has_ranks():
                        break
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise UsageError(f"job {self._number} of Slurm has started no rank for {STEP_SECONDS:g} s") from None
        if state in WAITING:
            await _slurm("scancel", self._number)
        elif state in RUNNING:
            await _slurm("scancel", "--signal=TERM", self._number)

    async def _has_ranks(self) -> bool:
        """Whether the job's first step, whose tasks a signal reaches, is there."""
        steps = await _slurm("squeue", "--noheader", "--steps", f"--jobs={self._number}", "--format=%i")
        return any(step.endswith(".0") for step in steps.split())

    async def fetch(self) -> None:
        """See `Cluster`: nodes write to the directory itself."""

    async def delete(self, keeps_state: bool) -> str:
        """See `Cluster`."""
        names = (SCRIPT_FILE, NUMBER_FILE, batch_script.TOKEN_FILE, batch_script.CODE_FILE, batch_script.DRAINING)
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        return ""

    async def close(self) -> None:
        """See `Cluster`: there is nothing."""


async def _slurm(*command: str) -> str:
    """What a command of Slurm's prints. Raises UsageError if there is none, or if it fails."""
    try:
        code, said = await here.answer(command, COMMAND_SECONDS)
    except OSError as error:
        raise UsageError(
            f"{command[0]}: cannot be run ({error.strerror}); use --on slurm on a node of a Slurm cluster, such as its "
            "login node, or with --dry-run"
        ) from error
    if code:
        raise UsageError(f"{' '.join(command[:3])}: {' '.join(said.split()) or f'exit code {code}'}")
    return said
