"""`make chaos`: a job whose ranks are killed, stopped, cut off, drained and given slow disks at random, and its result.

The same seed gives the same events. Exit code 0: the result is right and every check passes; 1: not; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rolecall.declare import registry
from tests.chaos import jobs, report
from tests.chaos.network import Network, NetworkError
from tests.chaos.plan import KINDS, plan
from tests.chaos.ranks import tail
from tests.chaos.soak import Soak

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def main() -> int:
    arguments = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    # an end of this tool by SIGTERM is to leave nothing behind either
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    network, soak = Network(), None
    busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(arguments.load)]
    try:
        namespaces = _start(network, console)
        columns = SpinnerColumn(), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("events")
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=arguments.kills)

            def say(line: str) -> None:
                # the time as in the ranks' logs
                stamp = datetime.now(UTC).strftime("%H:%M:%S.%f")[:-4]
                progress.console.print(f"{stamp} {line}", markup=False, highlight=False, soft_wrap=True)

            count, gap, shape = arguments.kills, arguments.gap, jobs.shape(arguments.job)
            try:
                events = plan(arguments.seed, count, gap, shape, cuts=namespaces, only=arguments.only)
            except ValueError as error:
                console.print(f"--only: {error}", markup=False, highlight=False)
                return 2
            soak = Soak(arguments.job, arguments.seed, network if namespaces else None, say, dict(arguments.set))
            soak.run(events, lambda done: progress.update(task, completed=done))
        return _conclude(soak, arguments, console)
    except KeyboardInterrupt:
        console.print("stopped" + (f"; logs and checkpoints: {soak.directory}" if soak else ""), highlight=False)
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # what stands is taken down, however impatient somebody is
        for process in busy:
            process.kill()
            process.wait()
        if soak:
            soak.close()
        network.close()


def _start(network: Network, console: Console) -> bool:
    try:
        network.start()
    except NetworkError as error:
        console.print(f"no network namespaces ({error}): loopback, no cuts", markup=False, highlight=False)
        return False
    return True


def _conclude(soak: Soak, arguments: argparse.Namespace, console: Console) -> int:
    checks = report.checks(soak)
    report.show(soak, checks, console)
    if not soak.result.failure and all(check.met is not False for check in checks):
        shutil.rmtree(soak.directory, ignore_errors=True)
        return 0
    if soak.result.failure:
        console.print(f"FAILED: {soak.result.failure}", markup=False, highlight=False)
    for rank in soak.keeper.ranks.values():
        console.print(f"===== {rank.log}\n{tail(rank.log)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"logs and checkpoints: {soak.directory}", markup=False, highlight=False)
    return 1


def _arguments() -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args()
    for name, _ in arguments.set:
        if name.lower() not in registry.get(arguments.job).settings.model_fields:
            parser.error(f"argument --set: {arguments.job} has no setting {name}")
    return arguments


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name.upper(), value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--job", choices=jobs.SOAKS, default="rl")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="events (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sequence of events (default: %(default)s)")
    kinds = tuple(dict.fromkeys(each for kind in KINDS for each in (kind.split()[0], kind)))
    parser.add_argument("--only", choices=kinds, default="", help="events whose kind begins so")
    gap = "mean seconds from a recovery to the next event (default: %(default)s)"
    parser.add_argument("--gap", type=float, default=2.0, metavar="S", help=gap)
    setting = "a setting of the job, e.g. UPDATE_MODE=local; repeatable"
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", help=setting)
    load = "processes that keep the machine busy beside it: its figures under load"
    parser.add_argument("--load", type=int, default=0, metavar="N", help=load)
    return parser


if __name__ == "__main__":
    sys.exit(main())
