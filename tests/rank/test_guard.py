"""A container's first process and what it does where its rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import until

# writes its number to the file, and does as it is told at each start
PROGRAM = """
import os, signal, sys, time
from rolecall.rank import guard
guard.SETTLED_SECONDS = {settled}
code = guard.guard(2)
if code is not None:
    sys.exit(code)
with open({starts!r}, "a") as starts:
    print(os.getpid(), file=starts)
number = len(open({starts!r}).readlines()) - 1
exec({actions!r}[number])
"""


def run(directory: Path, *actions: str, settled: float = 10.0) -> tuple[subprocess.Popen[str], Path]:
    starts = directory / "starts"
    program = PROGRAM.format(starts=str(starts), actions=actions, settled=settled)
    return subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE), starts


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
# exits with code 5 at a signal, also at one between the line of its output and its wait
HANDLES = """
awakened, waker = os.pipe()
os.set_blocking(waker, False)
signal.set_wakeup_fd(waker)
signal.signal({number}, lambda *_: sys.exit(5))
print("there", flush=True)
os.read(awakened, 1)
"""


@pytest.mark.parametrize(
    ("actions", "code"),
    [
        (["sys.exit(2)"], 2),
        (["sys.exit(1)", KILLED, "sys.exit(0)"], 0),
        ([KILLED, KILLED, KILLED], 128 + signal.SIGKILL),
    ],
)
def test_a_crash_is_restarted_until_there_were_too_many(tmp_path: Path, actions: list[str], code: int) -> None:
    process, starts = run(tmp_path, *actions)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert len(set(starts.read_text().split())) == len(actions)
    assert output.count("restarting it") == len(actions) - 1
    assert ("crashed too often" in output) == (code > 3)


@pytest.mark.parametrize(("before", "code"), [("", 128 + signal.SIGKILL), ("guard.joined(); ", 0)])
def test_only_work_after_a_join_ends_a_row_of_crashes(tmp_path: Path, before: str, code: int) -> None:
    process, _ = run(tmp_path, *[before + KILLED] * 3, "sys.exit(0)", settled=0.0)  # each lives for longer
    process.communicate(timeout=30)
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_is_no_crash(tmp_path: Path, number: signal.Signals) -> None:
    process, starts = run(tmp_path, HANDLES.format(number=int(number)))
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(number)
    assert process.wait(30) == 5
    assert len(starts.read_text().split()) == 1


def test_a_signal_between_two_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    process, starts = run(tmp_path, "sys.exit(1)", "sys.exit(1)", "time.sleep(60)")
    assert process.stdout is not None
    until(lambda: "restart=2" in process.stdout.readline(), "the second pause")  # type: ignore[union-attr]
    process.terminate()
    assert process.wait(30) in (1, 128 + signal.SIGTERM)  # in the pause, or of the third
    for pid in starts.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_what_a_rank_leaves_behind_is_killed_and_reaped(tmp_path: Path) -> None:
    daemon, ended = tmp_path / "daemon", tmp_path / "ended"
    orphans = f"""
import subprocess
subprocess.run(["sh", "-c", "setsid sleep 600 & echo $! >{daemon}; true & echo $! >{ended}"])
while os.path.exists("/proc/" + open({str(ended)!r}).read().strip()):
    time.sleep(0.01)
{KILLED}
"""
    process, _ = run(tmp_path, orphans, f"sys.exit(os.path.exists('/proc/' + open({str(daemon)!r}).read().strip()))")
    process.communicate(timeout=30)
    assert process.returncode == 0
