"""Hooks of the documentation's site, mkdocs.yml: pages that are not in docs/, and links that lead out of it."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import rolecall

ROOT = Path(__file__).resolve().parents[1]
# files of the repository that the site has, by their place in it
FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "LICENSE": "LICENSE",
    "constraints.txt": "constraints.txt",
}
EXAMPLES = "examples.md"
API = "api.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]+)?(?=\))")
# the public names, by what they are for
NAMES = {
    "A job": ("Job", "Role", "Settings", "remote", "PerRank", "FromUser", "Seconds", "Metric"),
    "In a role": ("Context", "Peer", "Future", "Queue", "Gradients", "PassKey"),
    "From Python": ("run", "start", "Run"),
    "State": ("Share", "LoggedShare", "Sharded", "Rows"),
    "Models and programs": ("Exported", "Program"),
    "Errors": (
        *("UsageError", "PeerLostError", "CallTimeoutError", "RemoteError", "ProgramError", "Drained"),
    ),
}  # fmt: skip
TABLES = {"Settings": "settings.md"}  # classes whose fields are in a table already
# Rolecall makes the context; what only it calls is left out
CONTEXT = {
    "merge_init_into_class": False,
    "inherited_members": True,
    "filters": ["!^_", "!^serve$", "!^require_saver$"],
}
OPTIONS = {"Settings": {"members": False}, "Context": CONTEXT}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and files that are not in docs/."""
    for source, place in FILES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, EXAMPLES, content=examples()))
    files.append(File.generated(config, API, content=api()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to their places in the site; a link to another file stays, and fails."""
    sources = {place: source for source, place in FILES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    return LINK.sub(
        lambda match: place(posixpath.normpath(posixpath.join(folder, match[1]))) + (match[2] or ""), markdown
    )


def place(path: str) -> str:
    """Where the site has the repository's file `path`."""
    if path.startswith("examples"):
        return EXAMPLES + "".join(f"#{re.sub(r'[^a-z0-9_-]', '', name)}" for name in path.split("/")[1:])
    return FILES.get(path) or path.removeprefix("docs/")


def examples() -> str:
    """A page with every file of examples/."""
    parts = ["# Examples\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
        parts += [f"## {path.name}\n", f"{about}\n", f"```python\n{text}```\n"]
    return "\n".join(parts)


def api() -> str:
    """A page with every public name. Raises ValueError for one that `NAMES` does not have, or has too much."""
    if difference := {name for names in NAMES.values() for name in names} ^ ({*rolecall.__all__} - {"__version__"}):
        raise ValueError(f"tools/site.py: NAMES and rolecall.__all__ differ by {', '.join(sorted(difference))}")
    parts = ["# API\n", "The public names of `rolecall`; what is not here may change in any version.\n"]
    for title, names in NAMES.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.append(f"::: rolecall.{name}\n    options: {json.dumps(OPTIONS.get(name, {}))}\n")
            if name in TABLES:
                parts.append(f"Its fields: [{TABLES[name].removesuffix('.md')}]({TABLES[name]}).\n")
    return "\n".join(parts)
