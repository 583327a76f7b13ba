"""What Slurm's srun and torchrun tell a process that they start: its number, rank 0's address, and so its ports.

srun: SLURM_PROCID is the number. Process 0 runs on the first node of the step's node list; in a step over several
components of a heterogeneous job, whose list is sorted, on the first node of the lowest component.

torchrun: RANK is the number. The agent of torchrun listens on MASTER_PORT, so rank 0 takes another port.

Several ranks share a node, and so do several jobs. A rank's ports therefore follow from the job (for torchrun, from
MASTER_PORT) and from its number. Every process can compute those of rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import UsageError

SLOTS = 2000  # pairs of a PORT and a METRICS_PORT
FIRST_PORT = 12000  # below those of `rolecall run` and of the kernel; with TLS=off rank 0 takes the next one too
FIRST_METRICS_PORT = FIRST_PORT + 2 * SLOTS
# jobs with neighbouring numbers are far apart: multiples of 0.618 of a circle keep away from each other (1237 and 753
# have no divisor in common with SLOTS)
JOB_STRIDE, STEP_STRIDE = 1237, 753
TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
SRUN = frozenset({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"})


@dataclass(frozen=True)
class Placement:
    """The place of this process among the `size` processes that a launcher has started. `variables` are settings that
    the launcher has set. The ports follow from `seed`, which `seed_variable` determines; `advice` says how to get
    others."""

    number: int
    size: int
    address: str
    seed: int
    size_variable: str
    seed_variable: str
    advice: str
    variables: frozenset[str] = frozenset()

    @property
    def port(self) -> int:
        """This process's PORT."""
        return self._port(FIRST_PORT, self.number)

    @property
    def rank0_port(self) -> int:
        """The PORT of process 0."""
        return self._port(FIRST_PORT, 0)

    @property
    def metrics_port(self) -> int:
        """This process's METRICS_PORT."""
        return self._port(FIRST_METRICS_PORT, self.number)

    def _port(self, first: int, number: int) -> int:
        return first + 2 * ((self.seed + number) % SLOTS)


def rank0_metrics_port(job: int) -> int:
    """The METRICS_PORT of rank 0 in the first step of Slurm's job with that number."""
    return FIRST_METRICS_PORT + 2 * (JOB_STRIDE * job % SLOTS)


def find(environ: Mapping[str, str]) -> Placement | None:
    """The placement of a process with the environment `environ`; None if neither srun nor torchrun has started it, or
    if torchrun has started a process that has given it a ROLE since.

    Raises UsageError if process 0 does not run where the others look for it.
    """
    if {"TORCHELASTIC_RUN_ID", *TORCHRUN} <= environ.keys() and not environ.get("ROLE"):
        return _of_torchrun(environ)
    if environ.keys() >= SRUN:
        return _of_srun(environ)
    return None


def _of_torchrun(environ: Mapping[str, str]) -> Placement:
    return Placement(
        number=_integer(environ, "RANK"),
        size=_integer(environ, "WORLD_SIZE"),
        address=environ["MASTER_ADDR"],
        seed=JOB_STRIDE * _integer(environ, "MASTER_PORT"),
        size_variable="WORLD_SIZE",
        seed_variable="MASTER_PORT",
        advice="start torchrun with another --master-port",
        variables=TORCHRUN,
    )


def _of_srun(environ: Mapping[str, str]) -> Placement:
    number, address, node = _integer(environ, "SLURM_PROCID"), _first_node(environ), environ.get("SLURMD_NODENAME", "")
    if number == 0 and node not in ("", address) and not environ.get("MASTER_ADDR"):
        raise UsageError(
            f"SLURM_PROCID=0 runs on {node}, and the others look for it on {address}, the step's first node: start "
            "srun without --distribution=arbitrary, or set MASTER_ADDR"
        )
    return Placement(
        number=number,
        size=_integer(environ, "SLURM_NTASKS"),
        address=address,
        seed=JOB_STRIDE * _integer(environ, "SLURM_JOB_ID") + STEP_STRIDE * _integer(environ, "SLURM_STEP_ID"),
        size_variable="SLURM_NTASKS",
        seed_variable="SLURM_JOB_ID",
        advice="submit the job again, or set PORT, MASTER_PORT and METRICS_PORT",
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(f"{name}={environ[name]!r}: is no number") from None


def _first_node(environ: Mapping[str, str]) -> str:
    """The node of the step's process 0."""
    step = environ["SLURM_STEP_NODELIST"]
    components = _integer(environ, "SLURM_HET_SIZE") if "SLURM_HET_SIZE" in environ else 0
    nodes = {*hosts(step)} if components else set[str]()
    lists = (environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", "") for component in range(components))
    of_components = (host for node_list in lists for host in hosts(node_list) if host in nodes)
    return next(of_components, "") or next(hosts(step), "")


def hosts(node_list: str) -> Iterator[str]:
    """The hosts of a node list of Slurm's, such as `gpu[01-03,7],login` or `rack[1-2]node[1-4]`, in its order. Raises
    UsageError."""
    for item in _split(node_list):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # a text, what is between brackets, a text, ...
        if any(mark in text for text in parts[::2] for mark in "[]"):
            raise UsageError(f"the node list {node_list!r}: cannot be read; set MASTER_ADDR")
        yield from _names(parts, node_list)


def _names(parts: Sequence[str], node_list: str) -> Iterator[str]:
    """One name after the other: the first is found at once, however many there are."""
    text, *rest = parts
    if not rest:
        yield text
        return
    for number in _numbers(rest[0], node_list):
        for name in _names(rest[1:], node_list):
            yield f"{text}{number}{name}"


def _split(node_list: str) -> list[str]:
    """The parts between the commas that are not in brackets."""
    return re.findall(r"(?:\[[^\]]*\]|[^,])+", node_list)


def _numbers(ranges: str, node_list: str) -> Iterator[str]:
    """The numbers of `1-3,07`, each with the zeros that it begins with."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise UsageError(f"the node list {node_list!r}: cannot be read; set MASTER_ADDR")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
