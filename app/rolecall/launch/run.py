"""`rolecall.run` and `rolecall.start`: a job is run from Python."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import BaseModel, TypeAdapter

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import flags, loader, preflight, registry
from rolecall.declare.spec import Job
from rolecall.errors import Drained, UsageError
from rolecall.launch import notebook
from rolecall.launch.process_run import ProcessRun
from rolecall.launch.thread_run import ThreadRun
from rolecall.messages.control import ListedRank
from rolecall.observe.watch import Display
from rolecall.record import rundir
from rolecall.record.history import read_rows

POLL_SECONDS = 0.05
START_SECONDS = 300.0  # for a file to be imported, by another process, and its settings to be checked
END_SECONDS = 30.0  # for a run that is stopped to end
_runs = weakref.WeakSet["Run"]()  # those that may not be over


class History:
    """The rows of a run's history.jsonl, as dicts: iterating yields those that are there, and more as they come, until
    the run is over."""

    def __init__(self, directory: Path, over: threading.Event) -> None:
        self._path, self._over = directory / rundir.HISTORY, over

    def __iter__(self) -> Iterator[dict[str, Any]]:
        end = inode = 0
        while True:
            is_last = self._over.is_set()
            with contextlib.suppress(FileNotFoundError):
                before, inode = inode, self._path.stat().st_ino
                end = end if before == inode else 0  # an earlier run's file has been set aside
            rows, end = read_rows(self._path, end)
            yield from map(msgspec.to_builtins, rows)
            if is_last:
                return
            self._over.wait(10 * POLL_SECONDS)

    def frame(self) -> Any:
        """The rows that are there as a pandas DataFrame. Raises UsageError if pandas is not installed."""
        with UsageError.wrap("history.frame()", ImportError, advice="install pandas"):
            pandas = importlib.import_module("pandas")
        return pandas.DataFrame([*map(msgspec.to_builtins, read_rows(self._path)[0])])


class Run:
    """A run of a job, which `rolecall.start` has started. Any thread may use it; `await run` is its result in an event
    loop. In a `with`, the block's end stops a run that is not over, and nothing of it is left but its `directory`.
    """

    def __init__(self, name: str, driver: ProcessRun | ThreadRun, display: Display) -> None:
        self.name, self._driver = name, driver
        self._leaving, self._over = False, threading.Event()
        self._cell = notebook.Cell(self, display, self._over, address=lambda: driver.page, state=driver.state)
        self._future = concurrent.futures.Future[dict[str, Any]]()
        self._future.set_running_or_notify_cancel()  # no waiting task that is cancelled ends the run
        self._thread = threading.Thread(target=self._follow, name=f"run of {name}", daemon=True)
        _runs.add(self)
        self._thread.start()

    def _follow(self) -> None:
        try:
            result = self._driver.run().result()
        except BaseException as error:  # Drained is no Exception
            self._over.set()
            self._future.set_exception(error)
        else:
            self._over.set()
            self._future.set_result(result)

    # ---- how it is

    @property
    def directory(self) -> Path:
        """Its checkpoints, history.jsonl, summary.json and logs."""
        return self._driver.directory

    @property
    def page(self) -> str:
        """The page: rank 0's URL while its process serves one, afterwards the file; empty if there is neither."""
        file = self.directory / rundir.PAGE
        return self._driver.page or (str(file) if self._over.is_set() and file.exists() else "")

    @property
    def status(self) -> str:
        """starting, running or draining; once it is over: finished, drained, refused or failed."""
        if not self._over.is_set():
            return "draining" if self._leaving else "running" if self._driver.up else "starting"
        match self._future.exception():
            case None:
                return "finished"
            case Drained():
                return "drained"
            case UsageError():
                return "refused"
        return "failed"

    @property
    def ranks(self) -> list[ListedRank]:
        """Its ranks, each with `name`, `role`, `ordinal`, `pid` and `state`; none once it is over."""
        return [] if self._over.is_set() else self._driver.ranks()

    @property
    def history(self) -> History:
        """What the job logs and what happens to it, row by row."""
        return History(self.directory, self._over)

    @property
    def result(self) -> dict[str, Any]:
        """What rank 0's function has returned, with the `seconds` of training, and whether the last checkpoint was
        `saved`, if the job has a state: the `result` of summary.json. Waits until the run is over.

        Raises ProgramError if the job has failed, chained to what was raised (RemoteError with its traceback, if
        another process raised it), Drained after `drain` or `stop`, with the newest checkpoint's step, UsageError for
        bad input, and RankError for what is nobody's input.
        """
        return self._future.result()

    def wait(self, timeout: float | None = None) -> str:
        """Waits until the run is over, for `timeout` seconds at most. Returns the `status`. Raises TimeoutError."""
        if not concurrent.futures.wait([self._future], timeout).done:
            raise TimeoutError(f"{self.name}: not over after {timeout:g} s")
        return self.status

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"<Run of {self.name}: {self.status}, in {self.directory}>"

    # ---- what is done to it

    def scale(self, role: str, count: int) -> None:
        """Starts ranks of an elastic role, or has those with the highest ordinals drain, so that there are `count`.
        Waits until the run is under way. Raises UsageError if that is not possible."""
        self._require_up()
        self._driver.scale(role, count)

    def kill(self, member: object) -> None:
        """Kills a member, such as `sampler_1` or a `Peer`, as a crash does: it is started again. Waits until the run is
        under way. Raises UsageError for one that is not there."""
        self._require_up()
        self._driver.kill(str(member))

    def drain(self) -> None:
        """Has the job write a checkpoint, and end; does not wait. The same `checkpoint_dir` resumes it."""
        if not self._over.is_set() and not self._leaving:  # a second one would stop it
            self._leaving = True
            self._driver.drain()

    def stop(self) -> None:
        """Ends the run at once, and waits until nothing of it is left; steps since the newest checkpoint are lost."""
        if not self._over.is_set():
            self._leaving = True
            self._driver.stop()
        self._thread.join(END_SECONDS)

    def await_up(self) -> None:
        """Waits until the run takes commands, or is over, for some minutes at most."""
        end = time.monotonic() + START_SECONDS
        while not self._driver.up and not self._over.wait(POLL_SECONDS) and time.monotonic() < end:
            pass

    def _require_up(self) -> None:
        self.await_up()
        if not self._driver.up:
            raise UsageError(f"{self.name}: the run is {'over' if self._over.is_set() else 'not under way yet'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- in a notebook

    def _ipython_display_(self) -> None:
        self._cell.show()


def run(
    job: Job | str | os.PathLike[str],
    *,
    in_process: bool = False,
    on: str = "local",
    image: str = "",
    name: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs a job, and returns its result, as `Run.result` does and raises. The arguments are those of `start`. In the
    main thread, Ctrl-C drains the job, and a second one stops it."""
    with start(job, in_process=in_process, on=on, image=image, name=name, **settings) as started:
        with _draining(started):
            started.wait()
        return started.result


def start(
    job: Job | str | os.PathLike[str],
    *,
    in_process: bool = False,
    on: str = "local",
    image: str = "",
    name: str | None = None,
    **settings: Any,
) -> Run:
    """Starts a job: a `Job` that a file holds in a variable, a path (`"pi.py"`), a module (`"package.module:NAME"`), or
    a built-in job's name. `settings` are the job's, by the names of its class; others come from the environment. Ranks
    are processes, or threads of this one if `in_process`, on `hosts:a,b`, or in containers of `image` (`docker`). The
    run's directory is `runs/NAME` if it has a `name`.

    Returns at once; for a path or a module, once another process has imported it. Raises UsageError for wrong settings,
    and for a job that ranks would not find, before anything starts.
    """
    given = {"on": "" if on == "local" else on, "image": image}
    words = [f"--{option}={value}" for option, value in given.items() if value]
    flags.take_options([*words, *["--in-process"] * in_process])
    if name is not None:
        settings["checkpoint_dir"] = rundir.named(name, "checkpoint_dir" in settings)
    return start_with(job, settings, in_process=in_process, words=words)


def start_with(
    job: Job | str | os.PathLike[str],
    settings: dict[str, Any],
    *,
    in_process: bool,
    words: Sequence[str] = (),
    stepped: Callable[[int], None] = lambda step: None,
) -> Run:
    """As `start`, with flags in `words`. If ranks are threads, `stepped` is told of each step that rank 0 has made, in
    its thread."""
    loader.require_imported()
    display = Display()
    show = display.lines.append if notebook.is_here() else _print
    if in_process:
        if not isinstance(job, Job):
            loader.forget_changed(loader.split(os.fspath(job))[0])
        declared = job if isinstance(job, Job) else registry.get(os.fspath(job))
        holder = registry.holder_of(declared)
        name = "job"
        if not isinstance(job, Job):
            name = os.fspath(job)
            registry.require_extra(name)
        elif holder and holder[0].__name__ != "__main__":
            name = f"{holder[0].__name__}:{holder[1]}"
        if holder and getattr(holder[0], "__file__", None):
            preflight.require_sound(declared, holder[0])
        values = _checked(declared, settings)
        started = Run(registry.name_of(name), ThreadRun(declared, values, name, show, stepped), display)
    else:
        target = registry.target_of(job) if isinstance(job, Job) else os.fspath(job)
        registry.require_target(target)
        known = job if isinstance(job, Job) else registry.get(target) if target in registry.JOBS else None
        if known:
            registry.require_extra(target)
            registry.roles(known, _checked(known, settings))
        of_settings, variables = _given(settings, known)
        driver = ProcessRun(target, [*words, *of_settings], variables, show)
        started = Run(registry.name_of(target), driver, display)
        try:
            if not known:
                started.await_up()
                if started.status == "refused":
                    _ = started.result
        except BaseException:  # such as Ctrl-C: nobody has the run
            started.stop()
            raise
    if notebook.is_here():
        started._ipython_display_()
    return started


def _checked(job: Job, settings: dict[str, Any]) -> Settings:
    """The settings of `job`. Raises UsageError for unknown ones and wrong values."""
    flags.require_known(job, settings)
    return config.load(job.settings, **settings)


def _given(settings: dict[str, Any], known: Job | None) -> tuple[list[str], dict[str, str]]:
    """`settings` as variables, which other users cannot read, and the flags that name them, for the process that knows
    the job. Raises UsageError for a value that no variable can hold."""
    variables = dict[str, str]()
    for name, value in settings.items():
        plain = _plain(value)
        if plain is None or plain == "":  # an empty variable counts as not set
            if not known or known.settings.model_fields[name].get_default(call_default_factory=True) != value:
                raise UsageError(f"{name}={value!r}: ranks that are processes cannot be given this; leave it out")
            plain = ""
        text = msgspec.json.encode(plain).decode() if isinstance(plain, list | dict) else str(plain)
        variables[name.upper()] = text
    words = [f"--given-settings={','.join(settings)}"] if settings else []
    if not known and "ranks" in settings:  # which says that the file is a program without a job
        words = [f"--ranks={variables.pop('RANKS')}", f"--given-settings={','.join(settings.keys() - {'ranks'})}"]
    return words, variables


def _plain(value: Any) -> Any:
    """`value` as JSON has it, with its secrets."""
    if hasattr(value, "get_secret_value"):
        return _plain(value.get_secret_value())
    if isinstance(value, Mapping | BaseModel):
        return {str(_plain(key)): _plain(each) for key, each in dict(value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(_plain, value)]
    return TypeAdapter(Any).dump_python(value, mode="json", fallback=str)


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
        print(line, file=sys.stdout, flush=True)


@contextlib.contextmanager
def _draining(run: Run) -> Iterator[None]:
    """Within the block, in the main thread, Ctrl-C drains the run, and a second one stops it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        act = run.stop if run._leaving else run.drain
        threading.Thread(target=act, daemon=True).start()  # a handler must not wait

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop_all() -> None:
    for run in [*_runs]:
        run.stop()


# as the executors of concurrent.futures, before which it is called: afterwards no thread can be started
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
