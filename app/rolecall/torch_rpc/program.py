"""Finds, checks and runs an unmodified program in a rank."""

from __future__ import annotations

import ast
import contextlib
import inspect
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.declare import loader
from rolecall.errors import ProgramError, UsageError
from rolecall.torch_rpc import adopt, failures
from rolecall.torch_rpc.script_calls import ScriptCalls

ENDED = (0, 128 + 15)  # exit codes of a program that has done what it was to do; the second after SIGTERM


class Program:
    """`script` is FILE.py, FILE.py:FUNCTION or package.module:FUNCTION, of which a function is called with rank and
    world size, and a file alone is run as `__main__`. `arguments`, quoted as for a shell, become `sys.argv`;
    `{rank}` and `{world_size}` in them are replaced. What follows a `--` in them are values of the function's further
    parameters; if these have to be given, all arguments are.

    Raises UsageError if these name nothing that can be run.
    """

    def __init__(self, script: str, arguments: str = "") -> None:
        target, colon, function = script.rpartition(":")
        if not colon:
            target, function = script, ""
        if not target or (colon and not function.isidentifier()):
            raise UsageError(f"SCRIPT={script!r}: name a program: FILE.py, FILE.py:FUNCTION or package.module:FUNCTION")
        self.script, self.target, self.function = script, target, function
        if not loader.is_file(target) and not function:
            raise UsageError(f"SCRIPT={script!r}: name the function of the module too: {script}:FUNCTION")
        try:
            self.arguments = shlex.split(arguments)
        except ValueError as error:
            raise UsageError(f"SCRIPT_ARGS={arguments!r}: {str(error).lower()}") from None
        self.path = loader.file_of(target) if loader.is_file(target) else None

    def check(self, settings: Settings, world_size: int) -> None:
        """Loads the program's function, as rank 0 would; compiles a file that is to be `__main__`, without running it.

        Raises UsageError with the place in the program that is wrong.
        """
        if not self.function:
            assert self.path is not None
            loader.compile_file(self.path)
            return
        adopt.adopt(settings, 0, world_size)
        self._load(self._prepare(0, world_size))

    def run(self, context: Context[Any]) -> None:
        """Runs the program, whose own rendezvous meets the generation's members. Returns when it has returned, or has
        ended by itself without an error. Raises ProgramError with the program's traceback.
        """
        rank, world_size = context.me.rank, len(context.members)
        with contextlib.suppress(UsageError):  # a rank other than 0 may have nowhere to write
            _ = context.files
        adopt.adopt(context.settings, rank, world_size, context.generation, context.torch.store())
        calls = ScriptCalls(context.members)
        calls.watch()
        context.watchdog.watch_calls(calls.pending)
        values = self._prepare(rank, world_size)
        # a forked process makes torch's pool of threads anew at its first use: of two threads at once, one finds none
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with self._ended_by_itself(context):
            if self.function:
                self._load(values)(rank, world_size, *values)
            else:
                assert self.path is not None
                module, code = loader.make_main(self.path)
                exec(code, module.__dict__)

    def _prepare(self, rank: int, world_size: int) -> list[Any]:
        """Makes this process what the program expects of one that Python has started. Returns the values of the
        function's further parameters.
        """
        replaced = {"{rank}": str(rank), "{world_size}": str(world_size)}
        words, values = [_replaced(word, replaced) for word in self.arguments], list[str]()
        if self.function and "--" in words:
            words, values = words[: words.index("--")], words[words.index("--") + 1 :]
        elif self.function and loader.takes_more(self.path or self.target, self.function, 2):
            words, values = [], words
        sys.argv[:] = [loader.shown(self.path) if self.path else self.target, *words]
        multiprocessing.set_start_method(None, force=True)  # a worker's own is set already
        return [_literal(value) for value in values]

    def _load(self, values: Sequence[Any]) -> Callable[..., object]:
        module = loader.load_file(self.path) if self.path else loader.load(self.target)
        function: Callable[..., object] | None = getattr(module, self.function, None)
        if function is None or not callable(function):
            problem = "is missing" if function is None else "is not callable"
            raise UsageError(f"{self.target}: the function {self.function} {problem}")
        try:
            signature = loader.signature(function)
            signature.bind(0, 1, *values)
        except ValueError:  # one of C has none
            pass
        except TypeError as error:
            further = f", and {', '.join(map(repr, values))}" if values else ""
            line = inspect.unwrap(function).__code__.co_firstlineno if inspect.isfunction(function) else 1
            raise UsageError(
                f"{self.target}:{line}: {self.function}{signature} must take a rank and a world size{further}: "
                f"{error}; the values of further parameters follow -- (SCRIPT_ARGS)"
            ) from None
        return function

    @contextlib.contextmanager
    def _ended_by_itself(self, context: Context[Any]) -> Iterator[None]:
        """Turns what a program may end with into a return, or into a ProgramError."""
        try:
            yield
        except UsageError:
            raise
        except SystemExit as end:
            if end.code is not None and end.code not in ENDED:
                raise ProgramError(f"{self.script} ended by sys.exit({end.code!r})") from None
        except KeyboardInterrupt:
            pass  # from the program's own handler of SIGTERM: SIGINT does not reach a worker
        except BaseException as error:
            if _says_that_a_peer_is_gone(error):
                # if one is, the gang ends this worker within a lease, and the peer's end is the cause
                time.sleep(1.5 * context.settings.lease_seconds)
            raise ProgramError(loader.users_traceback(error)) from None
        finally:
            with contextlib.suppress(OSError, ValueError):  # the program may have closed it
                sys.stdout.flush()


def _replaced(word: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _literal(word: str) -> Any:
    """The value of a word that is one in Python, such as 4 or True; any other is a string."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word


def _says_that_a_peer_is_gone(error: BaseException | None) -> bool:
    while error is not None:
        if failures.is_lost(error):
            return True
        error = error.__cause__ or error.__context__
    return False
