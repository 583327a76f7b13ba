"""Settings. The only module that reads the process environment.

Every variable is a field of a settings class: `Settings` has those that all jobs share, and a job's own class adds to
it. `load` makes an instance from the environment, or raises one `UsageError` that names every wrong variable.
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

from rolecall.errors import UsageError
from rolecall.fields import Agreed, is_from_user, problems
from rolecall.machine import cores
from rolecall.secret import read_token, require_length

__version__ = "0.1.0"

DESCRIPTION = "ROLECALL_DESCRIPTION"
SOURCES = "ROLECALL_SOURCES"  # a file: see declare/sources.py
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Epochs = Annotated[int, Field(ge=1, le=1_000_000, description="passes over the training data")]


class Settings(BaseSettings):
    """The settings of every rank of every job."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True, frozen=True)

    job: str = Field("", description="the job to take part in: see `rolecall jobs`; or FILE.py, or package.module")
    role: str = Field(
        "",
        description="this rank's role; otherwise taken from RANK or a host name rank-<n>, otherwise assigned",
    )
    instance: Agreed[str] = Field("", description="name of this copy of the job; another copy's ranks are refused")
    ordinal: int | None = Field(
        None, ge=0, le=9999, description="number within the role; otherwise from a host name <role>-<n>, or assigned"
    )
    rank: int | None = Field(
        None, ge=0, le=9999, description="torch's own variable, used where ROLE is not given: 0 is the first role"
    )
    world_size: int | None = Field(None, ge=1, le=10000, description="torch's own variable, checked against the counts")
    master_addr: str = Field(
        "127.0.0.1", min_length=1, description="rank 0's address; names are resolved anew each time"
    )
    port: int = Field(
        29400, ge=1, le=65534, description="this rank's one port for all that ranks send each other; with TLS=off rank "
        "0's, which takes the next one too, and RPC takes any"
    )  # fmt: skip
    master_port: int | None = Field(None, ge=1, le=65534, description="rank 0's PORT, where it is not this rank's")
    metrics_port: Port = Field(8000, description="this rank's port for /metrics, probes and, at rank 0, the page")
    bind_addr: str = Field("", description="name or address that PORT is listened on; empty: every address")
    metrics_bind_addr: str = Field("", description="name or address that METRICS_PORT listens on; empty: BIND_ADDR")
    tls: Literal["require", "always", "off"] = Field(
        "require", description="TLS between ranks: whoever has neither JOB_TOKEN nor a certificate of TLS_CA is "
        "nobody; always: of one machine's ranks too; off: whoever reaches a port can run code"
    )  # fmt: skip
    tls_cert: Path | None = Field(None, description="PEM file: this rank's certificate, instead of one from JOB_TOKEN")
    tls_key: Path | None = Field(None, description="PEM file: the key of TLS_CERT")
    tls_ca: Path | None = Field(None, description="PEM file: the authority of all ranks' TLS_CERT, and of no others")
    job_token: SecretStr | None = Field(None, description="secret of all ranks, from 16 bytes (`rolecall token`)")
    job_token_file: Path | None = Field(None, description="file that holds JOB_TOKEN")
    checkpoint_dir: Path = Field(Path("checkpoints"), description="rank 0's directory for checkpoints and DONE")
    resume: bool = Field(
        True,
        description="resume from the newest checkpoint; 0: move an earlier run's checkpoints aside and start a new run",
    )
    checkpoint_interval: Seconds = Field(30.0, description="seconds between checkpoints")
    checkpoint_shards: Literal["auto", "direct", "stream"] = Field(
        "auto",
        description="who writes what several ranks hold a share of: each its own share to its CHECKPOINT_DIR (direct), "
        "rank 0 what they send it (stream); auto: direct where that is rank 0's directory, stream otherwise",
    )
    checkpoint_keep: int = Field(3, ge=1, le=1000, description="newest checkpoints kept")
    on_finish: Literal["exit", "linger"] = Field(
        "exit", description="after the job: exit, or continue to serve metrics (for pods, which are always restarted)"
    )
    leave_code: int = Field(
        0, ge=0, le=255, description="exit code of a rank that SIGTERM stops before the job's end; of a Job's pod not 0"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where this rank computes")
    threads: int = Field(
        0, ge=0, le=1024, description="torch's threads for large computations, per rank; 0: all cores of this process"
    )
    seed: Agreed[int] = Field(1, ge=0, le=2**31 - 1, description="seed of everything random")
    log_format: Literal["text", "json"] = Field("text", description="one event a line, as text or as JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    trace: bool = Field(
        False,
        description="records the remote calls, steps and checkpoints of all ranks in rank 0's CHECKPOINT_DIR/trace",
    )
    sinks: str = Field(
        "auto",
        description="where logged values go too: tensorboard, mlflow, wandb (separated by commas), or none; auto: "
        "tensorboard where it is installed",
    )
    log_interval: int = Field(10, ge=1, le=1_000_000, description="iterations or steps between progress lines")
    lease_seconds: Agreed[Seconds] = Field(
        6.0, ge=1, description="seconds of silence after which a rank or a worker is lost"
    )
    join_grace: Seconds = Field(
        10.0, description="seconds that a start waits for an elastic role's count before its minimum is enough"
    )
    rejoin_interval: Seconds = Field(10.0, description="least seconds between two regroups that admit new ranks")
    rejoin_timeout: Seconds = Field(600.0, description="seconds to wait for rank 0, and at rank 0 for missing ranks")
    connect_timeout: Seconds = Field(30.0, description="deadline of a generation's RPC rendezvous, in seconds")
    rpc_timeout: Seconds = Field(10.0, description="deadline of one remote call, in seconds")
    phase_timeout: Seconds = Field(
        1800.0,
        description="deadline of a phase: checking the settings, loading, restoring, compiling, evaluating or saving",
    )
    stuck_seconds: Seconds = Field(
        300.0,
        description="seconds after which a step of rank 0 that also takes ten times as long as the last ones is stuck",
    )
    drain_timeout: Seconds = Field(
        20.0, description="seconds to drain in: finish the step, leave; a phase such as saving has its own deadline"
    )
    max_failures: int = Field(
        3, ge=1, le=1000, description="workers that may raise without progress before the job fails"
    )
    max_restarts: int = Field(
        20,
        ge=1,
        le=10_000,
        description="generations that may end without a new step, for any cause, before the job fails",
    )
    progress_timeout: Seconds = Field(
        3600.0, description="seconds in which generations may end without a new step before the job fails"
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
        """Whether ranks reach each other over TLS only."""
        return self.tls != "off"

    @property
    def rank0_port(self) -> int:
        """Rank 0's PORT."""
        return self.master_port or self.port

    @property
    def token(self) -> str:
        """The shared secret, or the empty string where none is set."""
        return self.job_token.get_secret_value() if self.job_token else ""

    def token_replaced(self) -> bool:
        """Whether JOB_TOKEN_FILE, which the token was read from, holds another one by now."""
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
        """Calls the user's callable that the setting `name` holds as `package.module:callable`, also of a module in the
        working directory. Raises UsageError where it cannot be imported, for whatever it raises, and for a setting that
        is not declared as `FromUser`.
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
        return cls(**overrides)
    except ValidationError as error:
        raise UsageError("wrong settings: " + "; ".join(problems(cls, error))) from None
    except SettingsError as error:  # a list or a table that is no JSON
        raise UsageError(f"wrong settings: {error}; give it as JSON") from None


def misspelt(settings: Iterable[str], environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Names in the environment that look like the variable of one of `settings` misspelt, with that variable."""
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
    """JOB, on which it depends which settings there are."""
    return os.environ.get("JOB", "")


def passed_description() -> str:
    """What `rolecall run` tells its ranks of a user's job; empty where it has not started this process."""
    return os.environ.get(DESCRIPTION, "")


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES, CUDA's own variable."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def host_name() -> str:
    """This machine's name, without its domain; the name of a StatefulSet's pod ends with its ordinal."""
    return socket.gethostname().split(".")[0]


def export(**names: str) -> None:
    """Sets variables that libraries read, in this process and those that it starts."""
    os.environ.update(names)


def replace_environment(names: Mapping[str, str]) -> None:
    """Makes `names` this process's environment: another process has forked it."""
    os.environ.clear()
    os.environ.update(names)


def forget(name: str) -> None:
    """Removes a variable from this process's environment, and so from that of those which it starts."""
    os.environ.pop(name, None)


def exported(name: str) -> str:
    """A variable that is no setting, such as a program may have set for its libraries; empty where there is none."""
    return os.environ.get(name, "")


def export_default(**names: str) -> None:
    """Sets those of the variables that are not set."""
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
    """This process's environment with `names` on top, for a process to be started."""
    return {**os.environ, **names}
