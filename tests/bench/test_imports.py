"""Benchmarks import what is there: they are run by hand, so nothing else notices a name that moved."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def names_in(path: Path) -> set[str]:
    """What a module binds at its top, also in a branch."""
    tree = ast.parse(path.read_text())
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            stored.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return stored


def test_the_benchmarks_import_what_is_there() -> None:
    missing = []
    for path in (ROOT / "bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("rolecall"):
                continue
            module = ROOT / "app" / Path(*(node.module or "").split("."))
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            submodules = {child.stem for child in module.glob("*")} if module.is_dir() else set()
            known = names_in(file) | submodules if file.exists() else submodules
            missing += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    assert missing == []
