"""Fills the code of README.md and docs/ in from the files that it is taken from.

A page has `<!-- snippet: FILE [REGION] -->` and `<!-- end of snippet -->`; a file marks a region with `# region NAME`
and `# endregion`. Without a region it is the whole file.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNIPPET = re.compile(r"(<!-- snippet: (\S+)(?: (\S+))? -->\n).*?(<!-- end of snippet -->)", re.DOTALL)
MARK = re.compile(r"^# (region \S+|endregion)\n", re.MULTILINE)


def fill(page: str) -> str:
    """`page` with the code that its snippets name. Raises ValueError for a region that the file does not have."""
    return SNIPPET.sub(lambda match: f"{match[1]}```python\n{code(match[2], match[3])}```\n{match[4]}", page)


def code(file: str, region: str | None) -> str:
    """The text of `region` in `file`, or of the whole file, without marks of regions."""
    text = (ROOT / file).read_text()
    if region is not None:
        match = re.search(rf"^# region {region}\n(.*?)^# endregion\n", text, re.DOTALL | re.MULTILINE)
        if match is None:
            raise ValueError(f"{file} has no region {region}")
        text = match[1]
    return MARK.sub("", text).strip("\n") + "\n"


def generate() -> dict[Path, str]:
    """README.md and every page of docs/ that has snippets, with its text."""
    pages = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    return {path: fill(text) for path, text in pages.items() if SNIPPET.search(text)}


if __name__ == "__main__":
    for path, text in generate().items():
        path.write_text(text)
