"""`rolecall completion SHELL`: commands, jobs and settings, for a shell to complete.

The script holds all of them, so completing a word starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import shtab

from rolecall.declare import flags, registry

FILES = ("run", "target")  # arguments that may be a file or a folder
FISH_FILES = "\ncomplete -c rolecall -n '_shtab_rolecall_using run' -F\n"


def script(shell: str, parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for `shell`. `parser` is the command line's, in which those of `commands` and of `run` are empty."""
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    subparsers.choices.update({**commands, "run": _run()})
    for action in _actions(parser):
        if action.dest == "job":
            action.choices = [*registry.JOBS, *shtab.Optional.FILE]
        elif action.dest in FILES or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if isinstance(action.metavar, str) and action.metavar.startswith("{"):  # a setting's values
            action.choices = action.metavar.strip("{}").split(",")
    text = str(shtab.complete(parser, shell))
    # a job may be a file, which the library does not expect in the place of a command
    text = text.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F")
    text = text.replace(
        "  _describe 'rolecall run commands' _commands\n", "  _describe 'rolecall run commands' _commands\n  _files\n"
    )
    return text + (FISH_FILES if shell == "fish" else "")


def _run() -> argparse.ArgumentParser:
    """The parser of `rolecall run`, with the flags of each built-in job."""
    parser = argparse.ArgumentParser(prog="rolecall run")
    jobs = parser.add_subparsers(metavar="JOB", dest="job")
    for name in registry.JOBS:
        job = registry.get(name)
        takes = flags.parser(job, name)
        jobs.add_parser(name, help=job.summary, parents=[takes], add_help=False)
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of `parser` and of its commands; jobs that are commands have their own files beside them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action
