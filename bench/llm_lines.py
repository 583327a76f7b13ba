"""Lines of code of the distributed part of a GRPO program: what starts members, passes data between them, and survives.

A line of code holds more than a comment or a docstring. Not counted, in any program: imports, lines that only report to
the benchmark, and what all programs share: the model, the sums, the loss.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection
from pathlib import Path

from bench.launch import REPOSITORY

OURS = REPOSITORY / "examples" / "grpo.py"
DISTRIBUTED = ("Reward", "Generator", "learner", "take", "ROLES", "JOB")  # in OURS; peers' programs are nothing else
REPORT = "llm_events."
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def of(system: str) -> int:
    """The lines of a system of bench_llm.py."""
    if system == "ours":
        return count(OURS.read_text(), DISTRIBUTED)
    return count((Path(__file__).parent / "peers" / f"grpo_{system}.py").read_text())


def count(source: str, names: Collection[str] | None = None) -> int:
    """The lines of code in the definitions and assignments of `names`, or in all statements but imports. Raises
    ValueError if a name is not defined."""
    chosen: set[int] = set()
    defined: set[str] = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or _is_text(statement):
            continue
        if names is None or (here := _names(statement) & set(names)):
            defined |= here if names is not None else set()
            first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
            chosen |= set(range(first, (statement.end_lineno or first) + 1)) - _texts(statement)
    if missing := set(names or ()) - defined:
        raise ValueError(f"not defined: {', '.join(sorted(missing))}")
    lines = source.splitlines()
    return len({number for number in chosen & _code(source) if REPORT not in lines[number - 1]})


def _names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _texts(statement: ast.stmt) -> set[int]:
    """The lines of all docstrings in a statement."""
    texts = (each for each in ast.walk(statement) if isinstance(each, ast.Expr) and _is_text(each))
    return {number for each in texts for number in range(each.lineno, (each.end_lineno or each.lineno) + 1)}


def _code(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {n for t in tokens if t.type not in LAYOUT for n in range(t.start[0], t.end[0] + 1)}
