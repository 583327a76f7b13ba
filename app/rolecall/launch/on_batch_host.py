"""`python -m rolecall.launch.on_batch_host NUMBER[,NUMBER]... HOST WORDS [: WORDS]...`: starts the ranks of a job on
Slurm from its batch script on HOST, as one step. The numbers are those of its components; the words for each are
options of srun, `--`, and the rank's command.

Slurm takes a node that does not answer from a job with `--no-kill`. The step goes on, and the ranks of that node start
on the others, each as a step. If it is the node of this process, the job would go on without its batch script: a task
on another node, `--guard`, has Slurm start the job again.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from rolecall import placement

SRUN = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL")
ONE = ("--overlap", "--nodes=1", "--ntasks=1")  # a step beside the others, which shares what the job has
ASK = ("squeue", "--noheader", "--states=all", "--format=%A|%N")
ANSWER_SECONDS = 60.0  # for a command of Slurm's
ASK_SECONDS = 10.0  # between two questions which nodes the job has
START_SECONDS = 1.0  # until the step is there
POLL_SECONDS = 0.2  # between two looks whether the step has ended
LAYOUT = re.compile(r"^\s*Node \d+ \((\S+)\), \d+ task\(s\): (.*)$", re.MULTILINE)


def parts_of(words: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The options and the command of each component."""
    groups = [list(group) for is_colon, group in itertools.groupby(words, lambda word: word == ":") if not is_colon]
    return [(group[: group.index("--")], group[group.index("--") + 1 :]) for group in groups]


def places_of(layouts: Sequence[str]) -> list[tuple[str, int]]:
    """The node and the component of each task, by what `sattach --layout` says of each component."""
    places = list[tuple[str, int]]()
    for component, layout in enumerate(layouts):
        tasks = {int(task): node for node, listed in LAYOUT.findall(layout) for task in re.findall(r"\d+", listed)}
        places += [(node, component) for _, node in sorted(tasks.items())]
    return places


def moves_of(places: Sequence[tuple[str, int]], nodes: Sequence[Sequence[str]]) -> dict[int, str]:
    """The tasks of `places` whose node is not among `nodes` of its component any more, each with another one, the
    emptiest."""
    taken = Counter(node for node, _ in places)
    moves = dict[int, str]()
    for task, (node, component) in enumerate(places):
        if node not in nodes[component]:
            moves[task] = min(nodes[component], key=lambda each: taken[each])
            taken[moves[task]] += 1
    return moves


def moved(task: int, size: int, job: str, first: str) -> list[str]:
    """A command that gives a rank in a step of its own the place of `task` among `size` of the job's first step."""
    values = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": first, "SLURM_NTASKS": str(size)}
    variables = {**values, "SLURM_PROCID": str(task)}
    return ["env", "--unset=SLURM_HET_SIZE", *(f"{name}={value}" for name, value in variables.items())]


class Batch:
    """The ranks of the job with components `jobs`, whose batch script runs on `host`."""

    def __init__(self, jobs: Sequence[str], host: str, words: Sequence[str]) -> None:
        self._jobs, self._job, self._host, self._parts = jobs, jobs[0], host, parts_of(words)
        self._places = list[tuple[str, int]]()
        self._first = ""  # the node of rank 0
        self._steps = dict[int, subprocess.Popen[bytes]]()  # of ranks that were moved
        self._codes = [0]
        self._guard: subprocess.Popen[bytes] | None = None
        self._guarded_from = ""

    def run(self) -> int:
        """Runs the ranks until all have ended. Returns the highest of their exit codes."""
        words = [[*options, *command] for options, command in self._parts]
        joined = [word for number, part in enumerate(words) for word in ([":"] * (number > 0) + part)]
        step, asked = subprocess.Popen([*SRUN, "--label", *joined]), time.monotonic()
        while step.poll() is None:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - asked > (ASK_SECONDS if self._places else START_SECONDS):
                self._look()
                asked = time.monotonic()
        for moved_step in self._steps.values():  # rank 0, which is none of them, has ended the job
            self._codes.append(moved_step.wait())
        if self._guard:
            self._guard.terminate()
        return max(step.returncode, *self._codes)

    def _look(self) -> None:
        """Starts ranks again whose node has gone, and the guard."""
        if not self._places:
            layouts = [_ask("sattach", "--layout", f"{job}.0") for job in self._jobs]
            self._places = places_of(layouts) if all(layouts) else []
            if not self._places:  # the step, whose number ranks know, is to be the first
                return
            self._first = self._places[0][0]
        nodes = nodes_of(self._jobs, _ask(*ASK, f"--jobs={self._job}"))
        if not all(nodes):  # there was no answer
            return
        for task, node in moves_of(self._places, nodes).items():
            self._move(task, node)
        others = [node for each in nodes for node in each if node != self._host]
        ended = self._guard is not None and self._guard.poll() is not None
        if others and (ended or self._guarded_from not in others):
            self._guarded_from = others[0]
            command = (sys.executable, "-P", "-m", "rolecall.launch.on_batch_host", "--guard", self._job, self._host)
            null = subprocess.DEVNULL
            group = next(number for number, each in enumerate(nodes) if others[0] in each)
            words = [*SRUN, *ONE, *self._group(group), f"--nodelist={others[0]}", *command]
            self._guard = subprocess.Popen(words, stdin=null, stdout=null, stderr=null)

    def _group(self, component: int) -> list[str]:
        return [f"--het-group={component}"] if len(self._jobs) > 1 else []

    def _move(self, task: int, node: str) -> None:
        before, component = self._places[task]
        print(f"srun: rank {task} was on {before}, which is lost: it starts again on {node}", flush=True)
        if old := self._steps.pop(task, None):
            old.kill()
            old.wait()
        self._places[task] = node, component
        options, command = self._parts[component]
        place = moved(task, len(self._places), self._job, self._first)
        words = [*SRUN, *options, *ONE, f"--nodelist={node}", *place, *command]  # one task, whatever the options say
        labelled = ["bash", "-o", "pipefail", "-c", f'"$@" 2>&1 | sed -u "s/^/{task}: /"', "srun"]
        self._steps[task] = subprocess.Popen([*labelled, *words], stdin=subprocess.DEVNULL)


def nodes_of(jobs: Sequence[str], said: str) -> list[list[str]]:
    """The nodes of each of `jobs`, by what `squeue` has said."""
    lists = dict(line.split("|", 1) for line in said.split() if "|" in line)
    return [[*placement.hosts(lists.get(job, ""))] for job in jobs]


def guard(job: str, host: str) -> None:
    """Has Slurm start the job again once it goes on without its batch host."""
    while True:
        time.sleep(ASK_SECONDS)
        (nodes,) = nodes_of([job], _ask(*ASK, f"--jobs={job}"))
        if nodes and host not in nodes:
            _ask("scontrol", "requeue", job)


def _ask(*command: str) -> str:
    """What a command of Slurm's prints; empty if it fails, as it does while the controller is away."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    if sys.argv[1] == "--guard":
        guard(*sys.argv[2:4])
    sys.exit(Batch(sys.argv[1].split(","), sys.argv[2], sys.argv[3:]).run())
