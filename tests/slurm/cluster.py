"""A Slurm cluster of this machine's own, for tests: munged, slurmctld and a slurmd for each node.

Each node has its own network namespace, host name and address, as a machine has. All files are in one folder. Without
root, the programs or network namespaces there is none, and the tests say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.network import Network, NetworkError

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PACKAGES = "munge slurmctld slurmd slurm-client"
DEADLINE = 60.0  # of every wait; a fail-safe
CORES = 8  # of each node, as Slurm counts them: it places tasks by them
CONTROLLER = "controller"
# /etc/hosts, /sys/fs/cgroup and the host name of these processes alone
ENTER = 'mount --bind "$1" /etc/hosts && mount -t tmpfs none /sys/fs/cgroup && hostname "$2" && shift 2 && exec "$@"'
CONFIGURATION = """\
ClusterName=rolecall
SlurmctldHost={controller}({address})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=25
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
"""


class SlurmError(Exception):
    """There can be no cluster here; the text says why."""


class Slurm:
    """The cluster, which `start` starts and `close` ends."""

    def __init__(self, nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rolecall-slurm-"))
        self.folder.chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "JOB"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}",
        }
        self._network = Network()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces: dict[str, str] = {}
        self.names = [f"node{number}" for number in range(1, nodes + 1)]

    # ---- its life

    def start(self) -> Slurm:
        """Starts the daemons. Raises SlurmError if there can be none."""
        missing = [name for name in PROGRAMS if not shutil.which(name, path=self.environment["PATH"])]
        if missing:
            raise SlurmError(f"no {', '.join(missing)} (Debian: {PACKAGES})")
        try:
            self._network.start()
            places = {name: self._network.add(name) for name in self.names}
        except (NetworkError, OSError, subprocess.SubprocessError) as error:
            raise SlurmError(f"no network namespaces: {error}") from error
        controller = self._network.own_address
        self._spaces = {name: prefix[-1] for name, (_, prefix) in places.items()}
        addresses = {CONTROLLER: controller, **{name: address for name, (address, _) in places.items()}}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._configure(addresses)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        munge = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}-file={munge[name]}" for name in ("pid", "log", "seed")]
        self._run(CONTROLLER, "munged", "-F", "--force", f"--key-file={key}", f"--socket={munge['socket']}", *options)
        self.until(munge["socket"].exists, "munged's socket")
        self._run(CONTROLLER, "slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        self.until(lambda: self.query("sinfo", "-h", "-o", "%T").split() == ["idle"], "all nodes idle")
        return self

    def _configure(self, addresses: dict[str, str]) -> None:
        for folder in ("state", "spool"):
            (self.folder / folder).mkdir()
        head = CONFIGURATION.format(controller=CONTROLLER, address=addresses[CONTROLLER], folder=self.folder)
        nodes = [f"NodeName={name} NodeAddr={addresses[name]} CPUs={CORES} RealMemory=1000" for name in self.names]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        (self.folder / "slurm.conf").write_text("\n".join([head, *nodes, partition, ""]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which needs none to be mounted

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node."""
        self._run(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kills all processes of a node, as a power failure does: nothing that one does on another's end leaves it."""
        self._network.cut(name)
        while running := self.processes(name):
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(running, DEADLINE)
        self._network.heal(name)
        self._daemons.pop(name).wait(DEADLINE)

    def processes(self, name: str, called: str = "") -> list[psutil.Process]:
        """The processes of a node; only those `called` so, if it is given."""
        shown = subprocess.run(["ip", "netns", "pids", self._spaces[name]], capture_output=True, text=True, check=False)
        found = []
        for pid in shown.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if called in process.name():
                    found.append(process)
        return found

    def tasks(self, name: str, word: str) -> list[psutil.Process]:
        """The tasks of jobs on a node whose command has `word`."""
        found = []
        for process in self.processes(name, "python"):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
        return found

    def _run(self, host: str, *command: str) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self._spaces[host]}"] if host in self._spaces else []
        with (self.folder / f"{host}-{command[0]}.out").open("ab") as output:
            self._daemons[command[0] if host == CONTROLLER else host] = subprocess.Popen(
                [*enter, "unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", self.folder / "hosts", host, *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """Ends every process of the cluster, and removes its files and namespaces."""
        for name in self._spaces:
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in self._daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(DEADLINE)
        self._network.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- its users

    def run(
        self, *command: str | Path, timeout: float = DEADLINE, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of a user's, who sees the cluster."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def query(self, *command: str) -> str:
        """The output of one of Slurm's commands; empty while the controller does not answer."""
        done = self.run(*command)
        return done.stdout.strip() if done.returncode == 0 else ""

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        shown = self.query("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def waits_for(self, number: str, *states: str, timeout: float = DEADLINE) -> dict[str, str]:
        """Waits until a job is in one of `states`."""
        self.until(
            lambda: self.job(number).get("JobState") in states, f"job {number} is {' or '.join(states)}", timeout
        )
        return self.job(number)

    def logs(self) -> str:
        """What the daemons have said."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"===== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    @staticmethod
    def until(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
        """Waits until `condition()` is true and returns it. Raises AssertionError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.1)  # a period, no race
        raise AssertionError(f"not within {timeout:g} s: {what}")
