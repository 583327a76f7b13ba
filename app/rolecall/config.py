"""Settings. The only module that reads the process environment.

Every variable is a field of a settings class: `Settings` has the fields of all jobs, a job's own class adds its fields.
`load` makes an instance from the environment, or raises one `UsageError` that names every wrong variable. What srun and
torchrun say of a process's place is read too, for variables that are not set.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from rolecall import placement
from rolecall.errors import UsageError
from rolecall.fields import Agreed, is_from_user, problems
from rolecall.machine import cores
from rolecall.secret import read_token, require_length

__version__ = "1.0.0rc1"

DESCRIPTION = "ROLECALL_DESCRIPTION"  # of a user's job, which `rolecall run` passes to its ranks
SOURCES = "ROLECALL_SOURCES"  # a file: see declare/sources.py
RUN = "ROLECALL_RUN"  # names a run whose rank 0 may move to another host
REASONS = "ROLECALL_REASONS"  # a file, to which processes of a run append why they end, for who has started it
SECRETS = "ROLECALL_SECRETS"  # a folder with a file for each secret setting, called as its field
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Settings(BaseSettings):
    """The settings of every rank of every job."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True, frozen=True)

    job: str = Field("", description="the job: a name of `rolecall jobs`, FILE.py, or package.module")
    role: str = Field(
        "",
        description="this rank's role; by default from RANK or a host name rank-<n>, or assigned by rank 0",
    )
    instance: Agreed[str] = Field("", description="name of this copy of the job; ranks of another copy are refused")
    ordinal: int | None = Field(
        None,
        ge=0,
        le=9999,
        description="number within the role; by default from a host name <role>-<n>, or assigned by rank 0",
    )
    rank: int | None = Field(
        None,
        ge=0,
        le=9999,
        description="torch's own variable, if ROLE is not set: 0 is the first role; by default srun's number",
    )
    world_size: int | None = Field(
        None, ge=1, le=10000, description="torch's own variable, checked against the counts; by default srun's"
    )
    master_addr: str = Field(
        "127.0.0.1",
        min_length=1,
        description="rank 0's address; a name is resolved at each connection; by default under srun its first node",
    )
    port: int = Field(
        29400,
        ge=1,
        le=65534,
        description="this rank's port for everything between ranks; with TLS=off rank 0's "
        "own, which uses the next one too, and RPC listens on any port; under srun and torchrun each has another",
    )
    master_port: int | None = Field(None, ge=1, le=65534, description="rank 0's PORT, if it differs from this rank's")
    metrics_port: Port = Field(8000, description="this rank's port for /metrics, probes and, at rank 0, the page")
    bind_addr: str = Field("", description="name or address on which PORT listens; empty: every address")
    metrics_bind_addr: str = Field("", description="name or address on which METRICS_PORT listens; empty: BIND_ADDR")
    tls: Literal["require", "always", "off"] = Field(
        "require",
        description="require: mutual TLS between ranks, by JOB_TOKEN or certificates of TLS_CA; always: "
        "also between ranks of one machine; off: unencrypted, and anybody who reaches a port can run code",
    )
    tls_cert: Path | None = Field(None, description="PEM file: this rank's certificate, instead of one from JOB_TOKEN")
    tls_key: Path | None = Field(None, description="PEM file: the key of TLS_CERT")
    tls_ca: Path | None = Field(
        None, description="PEM file: the authority that signs every rank's TLS_CERT, and nothing else"
    )
    job_token: SecretStr | None = Field(
        None, description="secret that all ranks share, at least 16 bytes (`rolecall token` makes one)"
    )
    job_token_file: Path | None = Field(None, description="file that holds JOB_TOKEN")
    checkpoint_dir: Path = Field(Path("checkpoints"), description="rank 0's directory for checkpoints and report")
    resume: bool = Field(
        True,
        description="resume from the newest checkpoint; 0: move an earlier run's checkpoints aside and start a new run",
    )
    checkpoint_interval: Seconds = Field(30.0, description="seconds between checkpoints")
    checkpoint_keep: int = Field(3, ge=1, le=1000, description="number of checkpoints to keep")
    checkpoint_copies: int = Field(
        0,
        ge=0,
        le=16,
        description="members that hold each checkpoint on their disk, on other machines than rank 0's where there are; "
        "1 by default with --hosts and in pods",
    )
    on_finish: Literal["exit", "linger"] = Field(
        "exit", description="after the job: exit, or stay up and serve metrics (for pods that are always restarted)"
    )
    leave_code: int = Field(
        0,
        ge=0,
        le=255,
        description="exit code of a rank that SIGTERM stops before the job's end; not 0 in a pod of a Kubernetes Job",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="the device on which this rank computes")
    threads: int = Field(
        0, ge=0, le=1024, description="torch's threads for large computations, per rank; 0: all cores of this process"
    )
    seed: Agreed[int] = Field(1, ge=0, le=2**31 - 1, description="seed of every random number generator")
    log_format: Literal["text", "json"] = Field("text", description="format of a log line")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest log level")
    trace: bool = Field(
        False,
        description="record remote calls, steps and checkpoints of all ranks in CHECKPOINT_DIR/trace of rank 0",
    )
    sinks: str = Field(
        "auto",
        description="further outputs of logged values: tensorboard, mlflow, wandb (separated by commas), or none; "
        "auto: tensorboard if it is installed",
    )
    log_interval: int = Field(10, ge=1, le=1_000_000, description="iterations or steps between progress lines")
    lease_seconds: Agreed[Seconds] = Field(
        6.0, ge=1, description="seconds without a heartbeat after which a rank or a worker is lost"
    )
    join_grace: Seconds = Field(
        10.0,
        description="seconds that a start waits for the count of an elastic role; after that, its minimum is enough",
    )
    rejoin_interval: Seconds = Field(
        10.0, description="minimum seconds between two generations that admit new ranks of roles that do not stay"
    )
    rejoin_timeout: Seconds = Field(600.0, description="seconds to wait for rank 0; at rank 0, for missing ranks")
    host_timeout: Seconds = Field(
        60.0,
        ge=20,
        description="with --hosts: seconds that a host stays away until its ranks start on others",
    )
    connect_timeout: Seconds = Field(
        30.0, description="seconds that the workers of a generation have to connect to each other"
    )
    rpc_timeout: Seconds = Field(
        10.0,
        description="seconds within which a peer answers a call, or, if it is asked then, that its method runs; with "
        "torch_rpc, the whole of a call of torch's",
    )
    max_message_bytes: int = Field(
        16 * 2**30,
        ge=2**20,
        le=2**40,
        description="bytes of a remote call or its answer that this rank accepts; a larger one fails",
    )
    phase_timeout: Seconds = Field(
        1800.0,
        description="deadline of a phase (checking, loading, restoring, compiling, evaluating, saving), in seconds",
    )
    stuck_seconds: Seconds = Field(
        300.0,
        description="seconds after which a called method is stuck, if above RPC_TIMEOUT; and a step of rank 0, if it "
        "also takes ten times as long as recent steps",
    )
    drain_timeout: Seconds = Field(
        20.0, description="seconds to finish the step and leave; a phase such as saving has PHASE_TIMEOUT"
    )
    max_failures: int = Field(
        3,
        ge=1,
        le=1000,
        description="generations without progress, in each of which a worker failed, after which the job fails",
    )
    max_restarts: int = Field(
        20,
        ge=1,
        le=10_000,
        description="generations without a new step, ended by any cause, after which the job fails",
    )
    progress_timeout: Seconds = Field(
        3600.0, description="seconds of generations without a new step after which the job fails"
    )
    spares: int = Field(
        0,
        ge=0,
        le=8,
        description="further workers that a rank whose role stays keeps loaded, to take the place of one that ends; "
        "each takes as much memory as its worker",
    )

    @field_validator("job_token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            require_length(token.get_secret_value())
        return token

    @field_validator("job_token_file")
    @classmethod
    def _usable(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        needed = info.data.get("tls") != "off" and info.data.get("tls_cert") is None
        if file is not None and info.data.get("job_token") is None and (needed or file.exists()):
            require_length(read_token(file))
        return file

    @model_validator(mode="after")
    def _token(self) -> Self:
        if self.job_token_file is not None and self.job_token is None and self.job_token_file.exists():
            object.__setattr__(self, "job_token", SecretStr(read_token(self.job_token_file)))
        files = {"TLS_CERT": self.tls_cert, "TLS_KEY": self.tls_key, "TLS_CA": self.tls_ca}
        missing = [name for name, file in files.items() if file is None]
        if 0 < len(missing) < len(files):
            raise ValueError(f"{' and '.join(missing)} missing: TLS_CERT, TLS_KEY and TLS_CA go together")
        return self

    @property
    def secure(self) -> bool:
        """Whether ranks use TLS."""
        return self.tls != "off"

    @property
    def rank0_port(self) -> int:
        """Rank 0's PORT."""
        return self.master_port or self.port

    @property
    def rank0_plain_port(self) -> int:
        """Rank 0's port for the workers, with TLS=off."""
        return self.rank0_port + 1

    @property
    def token(self) -> str:
        """The shared secret; empty if none is set."""
        return self.job_token.get_secret_value() if self.job_token else ""

    def token_replaced(self) -> bool:
        """Whether JOB_TOKEN_FILE now holds another token than the one that was read from it."""
        if self.job_token_file is None or "job_token" in self.model_fields_set:
            return False
        try:
            return read_token(self.job_token_file) != self.token
        except ValueError:  # it is being replaced
            return False

    @property
    def cpu_threads(self) -> int:
        """Threads for a large computation: THREADS, or all cores that this process may use."""
        return self.threads or cores()

    def build(self, name: str, *arguments: Any) -> Any:
        """Calls the callable that the setting `name` names as `package.module:callable`. Modules in the working
        directory are found too. Raises UsageError if it cannot be imported, if it raises, and if the setting is not
        declared as `FromUser`.
        """
        target, variable = getattr(self, name), name.upper()
        if not is_from_user(type(self).model_fields[name]):
            raise UsageError(f"{type(self).__name__}.{name}: names code; declare it as Annotated[str, FromUser()]")
        module, _, attribute = target.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        with UsageError.wrap(f"{variable}={target}: cannot be imported", advice="write package.module:name"):
            function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            raise UsageError(f"{variable}={target}: is not callable")
        with UsageError.wrap(f"{variable}={target}: raised an error"):
            return function(*arguments)


S = TypeVar("S", bound=Settings)


def load(cls: type[S], **overrides: Any) -> S:
    """The settings of `cls` from the environment; `overrides` (by field name) win.

    Raises UsageError, whose text names every wrong variable with its value and what is expected.
    """
    try:
        return cls(**{"_secrets_dir": os.environ.get(SECRETS), **_placed(), **overrides})
    except ValidationError as error:
        raise UsageError("wrong settings: " + "; ".join(problems(cls, error))) from None
    except SettingsError as error:  # a list or a table that is not JSON
        raise UsageError(f"wrong settings: {error}; give it as JSON") from None


def _placed() -> dict[str, Any]:
    """The settings, by field, that follow from where srun or torchrun has started this process; not those that are
    set."""
    place = placement.find(os.environ)
    if place is None:
        return {}
    given = {name for name, value in os.environ.items() if value} - place.variables
    values = {"master_addr": place.address, "port": place.port, "metrics_port": place.metrics_port}
    values["master_port"] = None if "PORT" in given else place.rank0_port
    if not given & {"ROLE", "RANK"}:
        values |= {"rank": place.number, "world_size": place.size}
    return {name: value for name, value in values.items() if name.upper() not in given}


def size_variable() -> str:
    """The variable that the setting `world_size` is taken from."""
    place = placement.find(os.environ)
    return place.size_variable if place and "world_size" in _placed() else "WORLD_SIZE"


def port_advice(variable: str) -> str:
    """What to do if nothing can listen on the port that `variable` names."""
    place = placement.find(os.environ)
    if place is None or variable.lower() not in _placed():
        return "choose another"
    return f"it follows from {place.seed_variable}: {place.advice}"


def outside_step() -> str:
    """The number of the Slurm job of this process, if srun has not started it; empty otherwise."""
    return "" if "SLURM_STEP_ID" in os.environ else os.environ.get("SLURM_JOB_ID", "")


def misspelt(settings: Iterable[str], environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Names in the environment that are probably misspelt variables of `settings`, each with the likely variable."""
    known = {name.upper() for name in settings}
    pairs = []
    for name in sorted(set(os.environ if environ is None else environ) - known):
        if len(name) < 3 or name.startswith("_"):
            continue
        close = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
        if close and close[0] != name.upper():
            pairs.append((name, close[0]))
    return pairs


def job_name() -> str:
    """JOB, which decides which settings exist."""
    return os.environ.get("JOB", "")


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES, CUDA's own variable."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def python_path() -> list[str]:
    """PYTHONPATH, Python's own variable: folders."""
    return [str(Path(each).absolute()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def host_name() -> str:
    """This machine's name, without its domain; the name of a StatefulSet's pod ends with its ordinal."""
    return socket.gethostname().split(".")[0]


def export(**names: str) -> None:
    """Sets environment variables for libraries, in this process and its children."""
    os.environ.update(names)


def replace_environment(names: Mapping[str, str]) -> None:
    """Replaces this process's environment, after a fork on behalf of another process."""
    os.environ.clear()
    os.environ.update(names)


def forget(name: str) -> None:
    """Removes an environment variable from this process and its children."""
    os.environ.pop(name, None)


def exported(name: str) -> str:
    """The value of a variable that is not a setting; empty if it is not set."""
    return os.environ.get(name, "")


def given(names: Iterable[str]) -> dict[str, str]:
    """Those of the variables `names` that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def export_default(**names: str) -> None:
    """Sets variables that are not set yet."""
    export(**{name: value for name, value in names.items() if name not in os.environ})


@contextlib.contextmanager
def exported_for_a_moment(**names: str) -> Iterator[None]:
    """Within the block, processes that this one starts inherit `names`."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(**names: str) -> dict[str, str]:
    """The environment of a child process: this process's, updated by `names`."""
    return {**os.environ, **names}
