"""What a run on Kubernetes is, by its objects as the cluster has them: its ranks, what they wait for, how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rolecall.declare.describe import Description
from rolecall.errors import CRASHED, FAILED, USAGE
from rolecall.gang.protocol import name_of
from rolecall.launch import pods
from rolecall.launch.pods import COMPONENT, CONTAINER, INDEX, Object
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.messages.control import ListedRank

# why a container waits, if that does not end by itself
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
FINAL = re.compile(
    r"InvalidImageName|ErrImageNeverPull|not found|not exist|denied|nauthorized|no such host|HTTP response"
)
STARTING = ("ContainerCreating", "PodInitializing", "")
OUT_OF_MEMORY = "OOMKilled"
LOST = timedelta(seconds=15)  # beyond its grace period: its node's kubelet would have ended it


@dataclass(frozen=True)
class Pod:
    """A pod of a rank."""

    item: Object

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.item["metadata"]["name"])

    @property
    def key(self) -> tuple[str, int]:
        """The role and the ordinal."""
        labels = self.item["metadata"]["labels"]
        return labels[COMPONENT], int(labels[INDEX])

    @property
    def uid(self) -> str:
        """No other pod has it."""
        return str(self.item["metadata"]["uid"])

    @property
    def host(self) -> str:
        """Where it is, for people."""
        node = self.item["spec"].get("nodeName", "")
        return f"{self.name}@{node}" if node else self.name

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to end."""
        return "deletionTimestamp" in self.item["metadata"]

    def is_lost(self, now: datetime) -> bool:
        """Whether it should have ended before `now` at the API server, and its node does not say so."""
        until = self.item["metadata"].get("deletionTimestamp")
        return bool(until) and not self.is_over and datetime.fromisoformat(until) + LOST < now

    def is_lost_with_its_node(self, now: datetime) -> bool:
        """Whether, besides, Kubernetes has told it to end because its node does not answer."""
        return self.is_lost(now) and any(
            condition["type"] == "DisruptionTarget" and condition.get("reason") == "DeletionByTaintManager"
            for condition in self.item["status"].get("conditions", [])
        )

    def state(self, kind: str) -> Object | None:
        """What the container's state says if it is that `kind`: waiting, running or terminated."""
        for container in self.item.get("status", {}).get("containerStatuses", []):
            if container["name"] == CONTAINER and kind in container["state"]:
                return dict(container["state"][kind])
        return None

    @property
    def is_over(self) -> bool:
        """Whether nothing runs in it any more."""
        return (
            self.item.get("status", {}).get("phase") in ("Succeeded", "Failed") or self.state("terminated") is not None
        )

    @property
    def has_begun(self) -> bool:
        """Whether its container has, or had, a process."""
        return self.state("running") is not None or self.state("terminated") is not None

    @property
    def code(self) -> int | None:
        """The exit code of what has ended."""
        ended = self.state("terminated")
        return int(ended["exitCode"]) if ended else None

    @property
    def shown(self) -> str:
        """What it does, in a word."""
        if ended := self.state("terminated"):
            if self.code:
                return OUT_OF_MEMORY if ended.get("reason") == OUT_OF_MEMORY else f"ended with {self.code}"
            return "done"
        if self.is_leaving:
            return "ending"
        if self.state("running") is not None:
            return "running"
        waiting = (self.state("waiting") or {}).get("reason", "")
        return waiting if waiting not in STARTING else "pending" if self.unscheduled else "starting"

    @property
    def unscheduled(self) -> str:
        """Why no node has it."""
        for condition in self.item.get("status", {}).get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("message") or condition.get("reason", ""))
        return ""

    @property
    def problem(self) -> str:
        """Why it does not start, if that is not only slow."""
        waiting = self.state("waiting") or {}
        if (reason := waiting.get("reason", "")) not in STARTING:
            return ": ".join(filter(None, (reason, " ".join(waiting.get("message", "").split()))))
        return f"no node has room for it ({self.unscheduled})" if self.unscheduled else ""

    @property
    def cause(self) -> str:
        """Why it has failed, in a line."""
        ended = self.state("terminated") or {}
        if ended.get("reason") == OUT_OF_MEMORY:
            limit = self.item["spec"]["containers"][0]["resources"]["limits"]["memory"]
            role, _ = self.key
            return f"{OUT_OF_MEMORY}: needs more memory than {limit}; give it more by --role {role}='memory_mb=8000'"
        lines = [line.strip() for line in ended.get("message", "").splitlines() if line.strip()]
        if not lines:
            status = self.item.get("status", {})
            return str(ended.get("reason") or status.get("message") or status.get("reason") or "no reason given")
        begins = lines[0].startswith(("rolecall: ", "the job failed: "))  # else it is the end of the log
        return str(lines[0] if begins else lines[-1]).removeprefix("rolecall: ")


@dataclass(frozen=True)
class Items:
    """The objects of a run of `job`."""

    job: Description
    items: Sequence[Object]

    def of(self, kind: str) -> list[Object]:
        """Those of a kind."""
        return [item for item in self.items if item["kind"] == kind]

    @property
    def pods(self) -> list[Pod]:
        """The ranks' pods, also those that were replaced, oldest first."""
        ranks = [item for item in self.of("Pod") if INDEX in item["metadata"]["labels"]]
        return [Pod(item) for item in sorted(ranks, key=lambda item: str(item["metadata"]["creationTimestamp"]))]

    def jobs(self, role: str) -> list[Object]:
        """The Job of a role, if there is one."""
        return [item for item in self.of("Job") if item["metadata"]["labels"].get(COMPONENT) == role]

    def current(self) -> dict[tuple[str, int], Pod]:
        """The newest pod of each rank."""
        return {pod.key: pod for pod in self.pods}

    @property
    def was_ended(self) -> bool:
        """Whether the run was told to end."""
        return any(pods.ENDED in item["metadata"].get("annotations", {}) for item in self.of("Job") + self.of("JobSet"))

    def ranks(self) -> list[ListedRank]:
        """All ranks."""
        current, ranks = self.current(), list[ListedRank]()
        for role in self.job.roles:
            jobs = self.jobs(role.name)
            for ordinal in range(jobs[0]["spec"]["completions"] if jobs else role.count):
                pod = current.get((role.name, ordinal))
                restarts = sum(each.key == (role.name, ordinal) for each in self.pods) - 1
                state = (pod.shown if pod else "no pod") + (f", replaced {restarts} times" if restarts > 0 else "")
                ranks.append(ListedRank(role.name, ordinal, 0, state, pod.host if pod else ""))
        return ranks

    def waits(self) -> str:
        """What ranks wait for to start."""
        pods = [pod for pod in self.current().values() if not pod.has_begun and not pod.is_leaving]
        for pod in pods:
            if pod.problem:
                return f"{name_of(pod.key)}: {pod.problem}"
        if any(item["spec"].get("suspend") for item in self.of("Job")) and not self.was_ended:
            return "its Jobs are suspended"
        return "pods start" if pods else ""

    def without_pods(self) -> list[str]:
        """Names of Jobs that should have pods, and have none."""
        have = {role for role, _ in self.current()}
        return [
            item["metadata"]["name"]
            for item in self.of("Job")
            if item["metadata"]["labels"].get(COMPONENT) not in have
            and not item["spec"].get("suspend")
            and not any(_has(item, condition) for condition in ("Complete", "Failed"))
        ]

    def end(self) -> tuple[int | None, str]:
        """The exit code of the run, None if it is not over; and why it failed."""
        first, *others = (self.jobs(role.name) for role in self.job.roles)
        sets = self.of("JobSet")
        if any(_has(item, "Complete") for item in first) or any(_has(item, "Completed") for item in sets):
            return 0, ""
        alive = [pod for pod in self.pods if not pod.is_over]
        if self.was_ended:
            return (None, "") if alive else (INTERRUPTED, "")
        if not self.of("Job") and not sets:
            return CRASHED, "its Jobs are gone: someone has deleted them"
        if any(_has(item, "Failed") for item in first):
            return self._failure(lambda pod: pod.key[0] == self.job.roles[0].name, first)
        if any(_has(item, "Failed") for item in sets):  # whichever Job failed first, the others are deleted
            return self._failure(lambda pod: True, sets)
        for jobs in others:
            if any(_has(item, "Failed") for item in jobs):
                code, reason = self._failure(lambda pod: pod.key[0] != self.job.roles[0].name, jobs)
                # rank 0, which has decided on it, ends with that too, and says why
                return (code, reason) if code != FAILED else (None, "")
        return self._refused()

    def _failure(self, is_meant: Callable[[Pod], bool], owners: Sequence[Object]) -> tuple[int, str]:
        """Of the pods that are meant, or else that are left, the exit code that says most, and the cause."""
        left = [pod for pod in self.pods if pod.code]
        failed = [pod for pod in left if is_meant(pod)] or left
        if not failed:
            said = " ".join(_has(owner, "Failed") for owner in owners)
            code = re.search(r"exit code (\d+)", said)
            return int(code[1]) if code else CRASHED, said
        pod = max(failed, key=lambda pod: (pod.code in (USAGE, FAILED), (pod.state("terminated") or {})["finishedAt"]))
        return pod.code or CRASHED, f"{pod.name}: {pod.cause}"

    def _refused(self) -> tuple[int | None, str]:
        """The end of a run whose image cannot be had."""
        for pod in self.current().values():
            waiting = pod.state("waiting") or {}
            if waiting.get("reason") in NO_IMAGE and FINAL.search(pod.problem):
                image = pod.item["spec"]["containers"][0]["image"]
                return USAGE, (
                    f"{image}: the cluster has no such image ({pod.problem}); push it where its nodes pull it "
                    "(`make push IMAGE=...`), and name it with --image"
                )
        return None, ""


def _has(item: Object, condition: str) -> str:
    """What a condition of a Job or a JobSet says if it is true; empty otherwise."""
    for each in item.get("status", {}).get("conditions", []):
        if each["type"] == condition and each["status"] == "True":
            return str(each.get("message") or condition)
    return ""
