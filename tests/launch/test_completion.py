"""`rolecall completion`: what a shell completes, as bash is told; other shells read the same parsers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rolecall.__main__ import SHELLS, main
from tests import commands
from tests.once import made_once

TRY = """
source "$1"; shift
COMP_WORDS=(rolecall "$@"); COMP_CWORD=$#
_shtab_rolecall 2>/dev/null  # `compopt` is for completions of an interactive shell
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell."""
    return made_once(tmp_path_factory, "completion", write)


def write(folder: Path) -> None:
    for shell in SHELLS:
        done = commands.run([sys.executable, "-m", "rolecall", "completion", shell])
        assert done.returncode == 0, done.stderr
        (folder / shell).write_text(done.stdout)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ma",), {"manifests"}),
        (("run", "r"), {"rl", "rnn"}),
        (("run", "rl", "--env-i"), {"--env-id"}),
        (("run", "rl", "--observers", "2", "--inference", ""), {"agent", "observer"}),
        (("run", "ps", "--update-m"), {"--update-mode"}),
        (("config", "hy"), {"hybrid"}),
        (("trace", "--sum"), {"--summary"}),
        (("logs", "--f"), {"--follow"}),
        (("export", "rl", "--form"), {"--format"}),
        (("completion", ""), set(SHELLS)),
        (("eval", "my_j"), {"my_job.py"}),
    ],
)
def test_bash_completes(scripts: Path, tmp_path: Path, words: tuple[str, ...], offered: set[str]) -> None:
    (tmp_path / "my_job.py").touch()
    done = commands.run(["bash", "-c", TRY, "try", str(scripts / "bash"), *words], cwd=tmp_path)
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_of_its_shell(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    # beside the built-in jobs, a file is one
    assert {"bash": "-o default", "zsh": "_commands\n  _files", "fish": "_using run' -F"}[shell] in text
    if shutil.which(shell):
        done = commands.run([shell, "-n", str(scripts / shell)])
        assert done.returncode == 0, done.stderr


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


def test_other_commands_start_without_it() -> None:
    check = "import sys, rolecall.__main__; assert not {'shtab', 'torch', 'rolecall.export'} & set(sys.modules)"
    assert commands.run([sys.executable, "-c", check]).returncode == 0
