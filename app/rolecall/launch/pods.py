"""The objects of a run on Kubernetes, as k8s/*-indexed and k8s/*-job have them: an Indexed Job for each role, or a
JobSet with all of these."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.declare.describe import Description, Needs
from rolecall.errors import FAILED, USAGE, UsageError
from rolecall.gang.protocol import RoleSpec

Object = dict[str, Any]
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"  # labels: the run, and the role
INDEX = "batch.kubernetes.io/job-completion-index"  # a label and an annotation of pods
JOB = "rolecall/job"  # an annotation: what the run runs
ENDED = "rolecall/ended"  # an annotation of Jobs that were told to end
CONTAINER, CHECKPOINTS = "rank", "/checkpoints"
SECRETS = "/run/secrets/rolecall"
METRICS_PORT = 8000
LEFT = 143  # of a rank that SIGTERM stops: with 0 its place would count as done
REPLACEMENTS = 6  # of a pod, after growing pauses; the rank itself is restarted in its container before that
GRACE_SECONDS = 60  # for a pod to end by itself, or more with a longer DRAIN_TIMEOUT
STORAGE = "10Gi"  # of the claim
COPIES = "12Gi"  # on a node's disk: what the claim holds, and the log
MOST_BYTES = 2**20  # that a ConfigMap holds
MOST_NAME = 40  # characters: names of pods have the role's and more behind it
# of a role that needs nothing else
LIMITS = {"cpu": "2", "ephemeral-storage": COPIES, "memory": "2Gi"}
REQUESTS = {"cpu": "250m", "ephemeral-storage": "128Mi", "memory": "512Mi"}
USER = {
    "fsGroup": 10001,
    "fsGroupChangePolicy": "OnRootMismatch",
    "runAsGroup": 10001,
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# of a dead node, which counts as one after 40 to 50 s
LOST = [
    {"effect": "NoExecute", "key": f"node.kubernetes.io/{key}", "operator": "Exists", "tolerationSeconds": 30}
    for key in ("unreachable", "not-ready")
]
CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
# the other order would fail a job whose evicted rank could not end its step in time
POD_FAILURES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [USAGE, FAILED]},
    },
]


@dataclass(frozen=True)
class Run:
    """What the objects are made of: the `job` as pods see it, its `variables`, and its `files` by path."""

    name: str
    job: Description
    image: str
    variables: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_secure: bool = True
    drain_seconds: float = 20.0

    @property
    def labels(self) -> Object:
        """Of all objects."""
        return {INSTANCE: self.name, "app.kubernetes.io/name": "rolecall"}

    @property
    def claim(self) -> str:
        """The claim of rank 0's checkpoints."""
        return f"{self.name}-checkpoints"

    @property
    def rank0(self) -> str:
        """Selects rank 0's pod."""
        return f"{INSTANCE}={self.name},{COMPONENT}={self.job.roles[0].name},{INDEX}=0"

    def job_of(self, role: str, is_set: bool) -> str:
        """The Job that runs `role`, by itself or in a JobSet."""
        return f"{self.name}-{_label(role)}" + ("-0" if is_set else "")

    def objects(self, is_set: bool) -> list[Object]:
        """All objects but the Secret: with a JobSet, or with Jobs. Raises UsageError for files that are too large."""
        jobs = [self._job(role, is_set) for role in self.job.roles]
        ranks = [self._jobset(jobs)] if is_set else jobs
        rank0 = self._object("v1", "Service", f"{self.name}-rank0", self._service(True))
        # a JobSet has its headless service by itself
        services = [rank0] if is_set else [self._object("v1", "Service", self.name, self._service(False)), rank0]
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": STORAGE}}}
        return [
            *services,
            self._object("networking.k8s.io/v1", "NetworkPolicy", self.name, self._policy()),
            self._object("v1", "PersistentVolumeClaim", self.claim, claim),
            {**self._object("v1", "ConfigMap", self.name), "data": dict(self.variables)},
            *([{**self._object("v1", "ConfigMap", f"{self.name}-files"), **self._files()}] if self.files else []),
            *ranks,
        ]

    def secret(self, values: Mapping[str, str]) -> Object:
        """The Secret, whose keys are files of the pods."""
        return {**self._object("v1", "Secret", self.name), "type": "Opaque", "stringData": dict(values)}

    def reader(self) -> Object:
        """A pod that holds the claim, in which commands can be run, for some minutes."""
        container = {
            "name": CONTAINER,
            "image": self.image,
            "command": ["sleep", "600"],
            "resources": {"limits": {**LIMITS, "cpu": "1"}, "requests": {**REQUESTS, "cpu": "50m", "memory": "64Mi"}},
            "securityContext": CONFINED,
            "volumeMounts": [{"name": "checkpoints", "mountPath": CHECKPOINTS}],
        }
        spec = {
            "automountServiceAccountToken": False,
            "securityContext": USER,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 600,
            "containers": [container],
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": self.claim}}],
        }
        reader = self._object("v1", "Pod", f"{self.name}-fetch", spec)
        reader["metadata"]["labels"] = {INSTANCE: self.name}  # none that a service or a policy selects
        return reader

    def _object(self, version: str, kind: str, name: str, spec: Object | None = None) -> Object:
        metadata = {"name": name, "labels": self.labels, "annotations": {JOB: self.job.name}}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **({"spec": spec} if spec else {})}

    def _service(self, is_rank0: bool) -> Object:
        ports: list[Object] = [{"appProtocol": "tls", "name": "rank", "port": 29400, "targetPort": "rank"}]
        if is_rank0:
            ports += [{"name": "store", "port": 29401}]
        else:
            ports.insert(0, {"appProtocol": "http", "name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"})
        first = {COMPONENT: self.job.roles[0].name, INDEX: "0"} if is_rank0 else {}
        return {
            **({} if is_rank0 else {"clusterIP": "None"}),
            "ipFamilyPolicy": "PreferDualStack",
            "ports": ports,
            "publishNotReadyAddresses": True,
            "selector": {**self.labels, **first},
        }

    def _policy(self) -> Object:
        """Ranks reach each other, and names; without TLS at any port."""
        pods = {"podSelector": {"matchLabels": self.labels}}
        ranks = {"ports": [{"port": 29400, "protocol": "TCP"}]} if self.is_secure else {}
        names = {
            "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
            "to": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
                {"ipBlock": {"cidr": "169.254.20.10/32"}},
            ],
        }
        scraped = {
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "ports": [{"port": "metrics", "protocol": "TCP"}],
        }
        return {
            "egress": [{**ranks, "to": [pods]}, names],
            "ingress": [{"from": [pods], **ranks}, scraped],
            **pods,
            "policyTypes": ["Ingress", "Egress"],
        }

    def _files(self) -> Object:
        """The job's files. Raises UsageError if they are too large for a ConfigMap."""
        if sum(map(len, self.files.values())) > MOST_BYTES * 9 // 10:
            raise UsageError(
                f"JOB={self.job.target}: its files are larger than a ConfigMap ({MOST_BYTES // 2**20} MiB); build an "
                "image that has them (FROM rolecall:cpu, COPY), and name it with --image"
            )
        values: Object = {"data": {}, "binaryData": {}}
        for number, content in enumerate(self.files.values()):
            try:
                values["data"][f"file-{number}"] = content.decode()
            except UnicodeDecodeError:
                values["binaryData"][f"file-{number}"] = base64.b64encode(content).decode()
        return values

    def _jobset(self, jobs: list[Object]) -> Object:
        first = _label(self.job.roles[0].name)
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [first]},
            "failurePolicy": {
                "maxRestarts": 0,
                "rules": [{"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {
                    "name": _label(role.name),
                    "replicas": 1,
                    "template": {"metadata": {"labels": job["metadata"]["labels"]}, "spec": job["spec"]},
                }
                for role, job in zip(self.job.roles, jobs, strict=True)
            ],
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self.name, spec)

    def _job(self, role: RoleSpec, is_set: bool) -> Object:
        spec = {
            "completionMode": "Indexed",
            "completions": role.count,
            "parallelism": role.count,
            "backoffLimitPerIndex": REPLACEMENTS,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",  # no two pods with one ordinal
            "podFailurePolicy": {"rules": POD_FAILURES},
            "template": {
                "metadata": {
                    "annotations": {
                        "prometheus.io/path": "/metrics",
                        "prometheus.io/port": str(METRICS_PORT),
                        "prometheus.io/scrape": "true",
                        "rolecall/master": f"{self.name}-rank0",
                    },
                    "labels": {COMPONENT: role.name, **self.labels},
                },
                "spec": self._pod(role, is_set),
            },
        }
        job = self._object("batch/v1", "Job", self.job_of(role.name, False), spec)
        job["metadata"]["labels"] = {COMPONENT: role.name, **self.labels}
        return job

    def _pod(self, role: RoleSpec, is_set: bool) -> Object:
        needs = self.job.needs[role.name]
        volumes: list[Object] = [
            {"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}, "name": "tmp"},
            {"name": "job-token", "secret": {"defaultMode": 0o440, "optional": True, "secretName": self.name}},
        ]
        if self.files:
            items = [{"key": f"file-{number}", "path": path} for number, path in enumerate(self.files)]
            volumes.append({"configMap": {"name": f"{self.name}-files", "items": items}, "name": "job"})
        claim = {"persistentVolumeClaim": {"claimName": self.claim}}
        # the others hold copies
        volumes.append({"name": "checkpoints", **(claim if role is self.job.roles[0] else {"emptyDir": {}})})
        spread = {
            "labelSelector": {"matchLabels": self.labels},
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
        }
        gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        return {
            "automountServiceAccountToken": False,
            "containers": [self._container(role, needs, {volume["name"] for volume in volumes})],
            "enableServiceLinks": False,
            "securityContext": USER,
            "terminationGracePeriodSeconds": max(GRACE_SECONDS, math.ceil(self.drain_seconds) + GRACE_SECONDS - 20),
            "topologySpreadConstraints": [spread],
            "volumes": volumes,
            "restartPolicy": "Never",
            "schedulerName": "default-scheduler",
            **({} if is_set else {"subdomain": self.name}),
            "tolerations": LOST + [gpu] * bool(needs.gpus),
        }

    def _container(self, role: RoleSpec, needs: Needs, volumes: set[str]) -> Object:
        mounts: list[Object] = [
            {"mountPath": "/tmp", "name": "tmp"},
            {"mountPath": SECRETS, "name": "job-token", "readOnly": True},
            {"mountPath": "/job", "name": "job", "readOnly": True},
            {"mountPath": CHECKPOINTS, "name": "checkpoints"},
        ]
        return {
            "env": [
                {"name": "JOB_TOKEN_FILE", "value": f"{SECRETS}/JOB_TOKEN"},
                _from_pod("MASTER_ADDR", "annotations", "rolecall/master"),
                _from_pod("INSTANCE", "labels", INSTANCE),
                {"name": "ROLE", "value": role.name},
                _from_pod("ORDINAL", "annotations", INDEX),
            ],
            "envFrom": [{"configMapRef": {"name": self.name}}],
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "livenessProbe": _probe("/healthz", 3, 10),
            "name": CONTAINER,
            "ports": [
                {"containerPort": METRICS_PORT, "name": "metrics"},
                {"containerPort": 29400, "name": "rank"},
            ],
            "readinessProbe": _probe("/readyz", 2, 2),
            "resources": _resources(needs),
            "securityContext": CONFINED,
            "startupProbe": {**_probe("/healthz", 60, 2), "initialDelaySeconds": 3},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [mount for mount in mounts if mount["name"] in volumes],
            **({"workingDir": "/job"} if self.files else {}),
        }


def name_of_run(directory: str) -> str:
    """The name of a run's objects, by that of its directory: a label of DNS that begins with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.lower()).strip("-")
    name = name if name[:1].isalpha() else f"r-{name}"
    if name == directory and len(name) <= MOST_NAME:
        return name
    digest = hashlib.sha256(directory.encode()).hexdigest()[:6]  # A_b and a-b are two
    return f"{name[: MOST_NAME - 7].rstrip('-')}-{digest}"


def _label(role: str) -> str:
    return role.lower().replace("_", "-")


def _from_pod(variable: str, kind: str, key: str) -> Object:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{kind}['{key}']"}}}


def _probe(path: str, failures: int, seconds: int) -> Object:
    return {
        "failureThreshold": failures,
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": seconds,
        "timeoutSeconds": 5,
    }


def _resources(needs: Needs) -> Object:
    """What a role needs is requested, and is its limit."""
    given = {"cpu": f"{needs.cpus:g}"} if needs.cpus else {}
    given |= {"memory": f"{needs.memory_mb}M"} if needs.memory_mb else {}
    given |= {"nvidia.com/gpu": str(needs.gpus)} if needs.gpus else {}
    return {"limits": {**LIMITS, **given}, "requests": {**REQUESTS, **given}}
