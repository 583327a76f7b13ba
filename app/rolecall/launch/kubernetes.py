"""`rolecall run JOB --on kubernetes`: the ranks are pods of Jobs, which kubectl submits, asks for, and ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import flags
from rolecall.declare.describe import Description
from rolecall.declare.flags import RunOptions
from rolecall.errors import FAILED, UsageError
from rolecall.gang.protocol import name_of
from rolecall.launch import fetch, here, hosts, kubectl, needs, pods
from rolecall.launch.containers import image_named
from rolecall.launch.followed import Seen
from rolecall.launch.kubectl import Kubectl, MissingError
from rolecall.launch.pod_states import Items, Pod
from rolecall.observe import targets
from rolecall.record import rundir
from rolecall.secret import read_token
from rolecall.tunnel import keys

TOKEN, TOKEN_KEY = "job-token", "JOB_TOKEN"  # a file in the run's directory; a key of the Secret
JOBSETS = "jobsets.jobset.x-k8s.io"
# the server refuses what is wrong; kubectl would ask it for all schemas first
APPLY = ("apply", "--server-side", "--force-conflicts", "--validate=false", "--filename=-")
GOES_SECONDS = 180.0  # for an earlier run's objects to go: pods have a minute to end
READER_SECONDS = 120  # for a pod to start that reads the claim
POLL_SECONDS = 0.3
MOST_LINE = 2**20  # bytes of a line without an end
ACT_SECONDS = 8.0  # for a command whose answer a user waits for
AT_ONCE = ("--grace-period=0", "--force", "--wait=false")  # for `kubectl delete`
NO_FINALIZERS = '{"metadata": {"finalizers": null}}'
PART = "pod"  # what else can be killed of a rank
NONE = "none-killed"


class Kubernetes:
    """The run of `job` in `directory`, with the methods of `Cluster`. Raises UsageError for files that are not sent."""

    engine = flags.KUBERNETES

    def __init__(self, job: Description, settings: Settings, options: RunOptions, directory: Path) -> None:
        sent, files = hosts.sent(job)
        given = {**hosts.given(sent), **sent.flags}
        for name in ("CHECKPOINT_DIR", "METRICS_PORT", "METRICS_BIND_ADDR"):  # pods have theirs
            given.pop(name, None)
        self._secrets = {name: given.pop(name.upper()) for name in sent.secrets if name.upper() in given}
        given.setdefault("CHECKPOINT_COPIES", str(hosts.COPIES))
        variables = {**given, "JOB": sent.target, "ON_FINISH": "exit", "LEAVE_CODE": str(pods.LEFT)}
        if self._secrets:
            variables[config.SECRETS] = pods.SECRETS
        self._job, self._settings, self._directory = job, settings, directory
        self._run = pods.Run(
            name=pods.name_of_run(directory.name),
            job=sent,
            image=image_named(options.image),
            variables=variables,
            files=files.files,
            is_secure=settings.secure,
            drain_seconds=settings.drain_timeout,
        )
        self._run.objects(False)  # files that are too large are refused before anything is done
        self.token_file = "" if settings.tls_cert else str(directory / TOKEN)
        self._kubectl = Kubectl(options.context, options.namespace)
        self._selector = f"--selector={pods.INSTANCE}={self._run.name}"
        self._has_sets, self._is_set, self._has_claim = False, False, False
        self._seen = Items(job, ())
        self._known_since = ""  # what ranks have written until then is here
        self._is_over, self._has_begun = False, False
        self._clock: tuple[datetime, float] | None = None  # the API server's, and this machine's monotonic one
        self._port: socket.socket | None = None  # bound to this machine's port for rank 0's page
        self._forwarding: tuple[str, asyncio.subprocess.Process] | None = None  # the pod's uid, and kubectl

    def manifest(self) -> str:
        """See `Cluster`: with Jobs, which every cluster has."""
        listed = {"apiVersion": "v1", "kind": "List", "items": self._run.objects(False)}
        return json.dumps(listed, indent=2) + "\n"

    # ---- submitting

    async def submit(self) -> str:
        """See `Cluster`."""
        name = self._run.name
        with contextlib.suppress(MissingError):
            await self._kubectl.run("get", "--raw", "/apis/jobset.x-k8s.io/v1alpha2")
            self._has_sets = True
        before = await self._items("persistentvolumeclaims")
        for item in before.items:
            job = item["metadata"].get("annotations", {}).get(pods.JOB, self._job.name)
            if job != self._job.name:
                raise UsageError(f"--name {name}: is a run of the job {job} on this cluster; name another one")
        (self._port,) = here.reserve(1, here.PORTS)
        is_over = before.end()[0] is not None or before.was_ended
        self._has_claim = bool(before.of("PersistentVolumeClaim"))
        if (before.of("Job") or before.of("JobSet")) and not is_over:
            self._is_set = bool(before.of("JobSet"))
            await self._take_token()
            self._know_logs()
            return f"{name} is under way on Kubernetes: found; its settings are those of its start"
        if before.items:
            await self._clear(before)
        if self._has_claim and self._is_to_resume:
            async with self._reader() as reader:
                resume = self._in(reader, "rolecall", "resume", pods.CHECKPOINTS)
                await self._kubectl.run(*resume)
        self._is_set = self._has_sets
        await self._create()
        resumes = f"; the claim {self._run.claim} has the state of an earlier run" if self._has_claim else ""
        return f"submitted to Kubernetes as {name} (kubectl get pods -l {pods.INSTANCE}={name}){resumes}"

    @property
    def _is_to_resume(self) -> bool:
        """Whether `rolecall resume` has forgotten here that the run had failed for good."""
        last = targets.last_run(self._directory)
        return last is not None and last.code == FAILED and not (self._directory / rundir.FAILED).exists()

    async def _create(self) -> None:
        """Creates all objects. Raises UsageError, and then nothing new is left."""
        secrets = dict(self._secrets)
        if token := self._settings.token or ("" if self._settings.tls_cert else keys.new_token()):
            secrets[TOKEN_KEY] = token
            self._write_token(token)
        kept = "PersistentVolumeClaim" if self._has_claim else ""  # its size may be another one by now
        items = [self._run.secret(secrets), *self._run.objects(self._is_set)]
        listed = {"apiVersion": "v1", "kind": "List", "items": [item for item in items if item["kind"] != kept]}
        try:
            await self._kubectl.run(*APPLY, given=json.dumps(listed))
        except UsageError:
            with contextlib.suppress(UsageError):  # the first error says what is wrong
                await self.delete(keeps_state=self._has_claim)
            raise

    def _write_token(self, token: str) -> None:
        with UsageError.wrap(f"CHECKPOINT_DIR={self._directory}: cannot be written", OSError):
            file = self._directory / TOKEN
            file.unlink(missing_ok=True)
            file.touch(0o600)
            file.write_text(token + "\n")

    async def _take_token(self) -> None:
        """Has the token of a run that was found in the file, where commands look for it."""
        with contextlib.suppress(ValueError):
            read_token(self._directory / TOKEN)
            return
        if self.token_file:
            secret = json.loads(await self._kubectl.run("get", "secret", self._run.name, "--output=json"))
            self._write_token(base64.b64decode(secret["data"][TOKEN_KEY]).decode())

    def _know_logs(self) -> None:
        """Notes until when the logs here have what ranks have written."""
        times = [path.stat().st_mtime for path in (self._directory / "logs").glob("*.log")]
        if times:
            last = max(times)
            self._known_since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(last)) + f".{int(last % 1 * 10**9):09}Z"

    async def _clear(self, before: Items) -> None:
        """Deletes what an earlier run has left, but for its state, and waits until it has gone."""
        leaving = any("deletionTimestamp" in item["metadata"] for item in before.of("PersistentVolumeClaim"))
        self._has_claim = self._has_claim and not leaving
        await self._delete(keeps_state=not leaving, words=[f"--timeout={GOES_SECONDS:g}s", "--cascade=foreground"])

    async def _delete(self, keeps_state: bool, words: list[str]) -> None:
        kinds = "jobs,pods,services,networkpolicies,configmaps,secrets"
        kinds += f",{JOBSETS}" * self._has_sets + ",persistentvolumeclaims" * (not keeps_state)
        await self._kubectl.run(
            "delete",
            kinds,
            self._selector,
            "--ignore-not-found",
            *words,
            seconds=GOES_SECONDS + kubectl.COMMAND_SECONDS,
        )

    async def _items(self, *more: str) -> Items:
        kinds = ["jobs", "pods", *([JOBSETS] if self._has_sets else []), *more]
        text = await self._kubectl.run("get", ",".join(kinds), self._selector, "--output=json")
        return Items(self._run.job, json.loads(text)["items"])

    # ---- following

    async def look(self) -> Seen:
        """See `Cluster`."""
        seen = self._seen = await self._items()
        current = seen.current()
        rank0 = current.get((self._job.roles[0].name, 0))
        runs = rank0 is not None and rank0.state("running") is not None
        self._has_begun = self._has_begun or any(pod.has_begun for pod in seen.pods)
        code, reason = seen.end()
        self._is_over = code is not None
        if rank0 and runs and code is None:
            await self._forward(rank0)
        waits = await self._let_go(await self._lost(seen)) or seen.waits()
        if not waits and (without := seen.without_pods()):
            waits = await self._why_none(without)
        return Seen(
            ranks=tuple(seen.ranks()),
            waits=waits,
            url=self._url if self._forwarding else "",
            place=tuple(self._place(rank0.name)) if rank0 and runs else (),
            code=code,
            reason=reason,
        )

    async def _lost(self, seen: Items) -> list[Pod]:
        """The pods that their node should have ended by now. The API server's clock is asked for once; that of this
        machine is taken if Kubernetes is older than 1.28."""
        if not any(pod.is_leaving for pod in seen.pods):
            return []
        if self._clock is None:
            try:
                asked = await self._kubectl.run("auth", "whoami", "--output=jsonpath={.metadata.creationTimestamp}")
                self._clock = datetime.fromisoformat(asked.strip()), time.monotonic()
            except (UsageError, ValueError):
                self._clock = datetime.now(UTC), time.monotonic()
        asked_at, since = self._clock
        now = asked_at + timedelta(seconds=time.monotonic() - since)
        return [pod for pod in seen.pods if pod.is_lost(now)]

    async def _let_go(self, lost: list[Pod]) -> str:
        """Deletes pods whose node is dead, which a Job would wait for. Returns a line that says so."""
        for pod in lost:
            with contextlib.suppress(MissingError):
                await self._kubectl.run("delete", "pod", pod.name, "--ignore-not-found", *AT_ONCE)
                # it stays for its Job, which would have its exit code
                await self._kubectl.run("patch", "pod", pod.name, "--type=merge", f"--patch={NO_FINALIZERS}")
        places = ", ".join(f"{name_of(pod.key)} ({pod.host})" for pod in lost)
        return f"{places}: lost with its node; another pod replaces it" if lost else ""

    @property
    def _url(self) -> str:
        assert self._port
        return f"http://127.0.0.1:{self._port.getsockname()[1]}/metrics"

    async def _why_none(self, jobs: list[str]) -> str:
        """Why Jobs have no pods."""
        selected = "--field-selector=involvedObject.kind=Job,reason=FailedCreate"
        events = json.loads(await self._kubectl.run("get", "events", selected, "--output=json"))["items"]
        said = [event["message"] for event in events if event["involvedObject"]["name"] in jobs]
        why = re.sub(r'^.*?pods "[^"]*" is ', "", said[-1]) if said else ""  # without a random name
        return f"{', '.join(jobs)}: no pods ({why})" if why else ""

    async def _forward(self, rank0: Pod) -> None:
        """Has a port of this machine's loopback lead to rank 0's page, also after its pod was replaced."""
        before = self._forwarding
        if before and before[0] == rank0.uid and before[1].returncode is None:
            return
        if before:
            await kubectl.end(before[1])
        assert self._port
        ports = f"{self._port.getsockname()[1]}:{pods.METRICS_PORT}"
        words = ("port-forward", "--address=127.0.0.1", f"pod/{rank0.name}", ports)
        self._forwarding = (rank0.uid, await self._kubectl.start(*words))

    async def written(self) -> AsyncIterator[tuple[str, bytes]]:
        """See `Cluster`."""
        queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(100)
        following = dict[str, asyncio.Task[None]]()
        try:
            while True:
                is_over = self._is_over
                for pod in self._seen.pods:
                    if pod.has_begun and pod.uid not in following:
                        following[pod.uid] = asyncio.create_task(self._follow(pod, queue))
                is_last = is_over and all(task.done() for task in following.values())
                while not queue.empty():
                    yield queue.get_nowait()
                if is_last:
                    return
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in following.values():
                task.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)

    async def _follow(self, pod: Pod, queue: asyncio.Queue[tuple[str, bytes]]) -> None:
        """Puts what a pod writes into the queue, until its end."""
        last, rank = self._known_since, name_of(pod.key)
        while True:
            alive = {each.uid for each in self._seen.pods if not each.is_over}
            since = [f"--since-time={last}"] if last else []
            words = ("logs", "--follow", "--timestamps", *since, f"--container={pods.CONTAINER}", f"pod/{pod.name}")
            process = await self._kubectl.start(*words)
            try:
                assert process.stdout
                rest = b""
                while data := await process.stdout.read(2**16):
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > MOST_LINE:
                        lines, rest = [*lines, rest], b""
                    fresh = [line for line in lines if _stamp(line) > last]
                    if fresh:
                        last = _stamp(fresh[-1])
                        await queue.put((rank, b"".join(line.partition(b" ")[2] + b"\n" for line in fresh)))
            finally:
                await kubectl.end(process)
            if pod.uid not in alive:  # it had ended before this began: all was read
                return
            await asyncio.sleep(POLL_SECONDS)

    # ---- acting

    def _pod(self, role: str, ordinal: int) -> Pod:
        """The pod of a rank that runs. Raises UsageError."""
        pod = self._seen.current().get((role, ordinal))
        if pod is None or pod.is_over or pod.is_leaving:
            state = f": it is {pod.shown}" if pod else ""
            raise UsageError(f"{name_of((role, ordinal))}: has no pod that runs{state}")
        return pod

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        """See `Cluster`: in the pod, where what was killed starts again; the part "pod" deletes that, and another one
        replaces it."""
        pod = self._pod(role, ordinal)
        if part == PART:
            await self._kubectl.run("delete", "pod", pod.name, *AT_ONCE)
            return f"killed {name_of(pod.key)}: deleted the pod {pod.name}; another one replaces it"
        script = f'python -P -m rolecall.launch.in_pod "$1" || echo {NONE}'
        command = ("sh", "-c", script, "rolecall", part)
        words = self._in(pod.name, *command)
        printed = " ".join((await self._kubectl.run(*words, seconds=ACT_SECONDS)).split())
        if printed.endswith(NONE):
            there = ", ".join(filter(None, [printed.removesuffix(NONE).strip(), PART]))
            raise UsageError(f"{name_of(pod.key)}: has no process {part!r}; its parts are: {there}")
        return f"killed {name_of(pod.key)} in {pod.host}: {printed}"

    async def scale(self, role: str, count: int) -> str:
        """See `Cluster`."""
        needs.require_scalable(self._job, role, count)
        if self._is_over or self._seen.was_ended:
            raise UsageError("the run is ending")
        job = self._run.job_of(role, self._is_set)
        change = {"spec": {"completions": count, "parallelism": count}}
        await self._kubectl.run(
            "patch", "job", job, "--type=merge", f"--patch={json.dumps(change)}", seconds=ACT_SECONDS
        )
        return f"{role} gets {count} pods (Job {job})"

    async def end(self, now: bool) -> None:
        """See `Cluster`: Jobs that are suspended end their pods as an eviction does, and replace none."""
        kind = JOBSETS if self._is_set else "jobs"
        if now:
            kinds = "jobs,pods" + f",{JOBSETS}" * self._has_sets
            await self._kubectl.run("delete", kinds, self._selector, "--ignore-not-found", *AT_ONCE)
            return
        await self._kubectl.run("annotate", kind, self._selector, "--overwrite", f"{pods.ENDED}=true")
        names = [item["metadata"]["name"] for item in self._seen.of("JobSet" if self._is_set else "Job")]
        words = ["--type=merge", '--patch={"spec": {"suspend": true}}']
        await asyncio.gather(*(self._kubectl.run("patch", kind, name, *words) for name in names))

    # ---- its end

    def _in(self, pod: str, *words: str) -> list[str]:
        """Words of kubectl: run others in a pod."""
        return ["exec", pod, f"--container={pods.CONTAINER}", "--", *words]

    def _place(self, pod: str) -> list[str]:
        folder = f'cd {pods.CHECKPOINTS} && exec "$@"'
        return self._kubectl.command(*self._in(pod, "sh", "-c", folder, "rolecall"))

    async def fetch(self) -> None:
        """See `Cluster`: from rank 0's pod if it runs, or by a pod that holds its claim."""
        rank0 = self._seen.current().get((self._job.roles[0].name, 0))
        if rank0 and rank0.state("running") is not None and not rank0.is_leaving:
            await self._copy(rank0.name)
        elif self._has_begun or self._has_claim:
            async with self._reader() as reader:
                await self._copy(reader)

    @contextlib.asynccontextmanager
    async def _reader(self) -> AsyncIterator[str]:
        """A pod that holds the claim."""
        reader = self._run.reader()
        name = reader["metadata"]["name"]
        remove = ("delete", "pod", name, "--ignore-not-found", "--grace-period=0", "--force")
        await self._kubectl.run(*remove)
        try:
            await self._kubectl.run(*APPLY, given=json.dumps(reader))
            wait = ("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={READER_SECONDS}s")
            await self._kubectl.run(*wait, seconds=READER_SECONDS + kubectl.COMMAND_SECONDS)
            yield name
        finally:
            with contextlib.suppress(UsageError):  # it ends by itself
                await self._kubectl.run(*remove, "--wait=false")

    async def _copy(self, pod: str) -> None:
        """Copies the run's files from a pod that has its folder."""
        place = fetch.Elsewhere(f"{pod}:", self._place(pod))

        def copy() -> None:
            names = place.names()
            files = [*fetch.chosen(names).values(), *({rundir.PAGE, rundir.FAILED} & names)]
            if files:
                place.copy(files, self._directory)
            if rundir.FAILED not in names:
                rundir.forget_failed(self._directory)

        with UsageError.wrap(f"CHECKPOINT_DIR={self._directory}: the run's files are not copied to it", OSError):
            await asyncio.to_thread(copy)

    async def delete(self, keeps_state: bool) -> str:
        """See `Cluster`. A claim that no rank has written to is not kept."""
        keeps_state = keeps_state and (self._has_begun or self._has_claim)
        await self._delete(keeps_state, ["--wait=false"])
        (self._directory / TOKEN).unlink(missing_ok=True)
        if not keeps_state:
            return ""
        kept, name = f"the claim {self._run.claim} keeps its state", self._directory.name
        if (self._directory / rundir.FAILED).exists():
            return f"{kept}: with another setting, or after `rolecall resume {name}`, the same --name resumes it"
        return f"{kept}, which the same --name resumes"

    async def close(self) -> None:
        """See `Cluster`."""
        if self._forwarding:
            await kubectl.end(self._forwarding[1])
        if self._port:
            self._port.close()


def _stamp(line: bytes) -> str:
    """The time with which a line of `kubectl logs --timestamps` begins."""
    return line.partition(b" ")[0].decode("ascii", "replace")
