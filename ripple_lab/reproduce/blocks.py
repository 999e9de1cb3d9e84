"""Blocks of README and docs that are written from result files, by `make results`.

A block stands between two comments, `<!-- results: NAME -->` and `<!-- end of results -->`. Its text
is what the function of that name in `BLOCKS` returns.
"""

import re
from collections.abc import Callable
from pathlib import Path

from ripple_lab.files import replace_text

BLOCKS: dict[str, Callable[[], str]] = {}
PATTERN = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def block(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function that writes the block of some name."""

    def register(write: Callable[[], str]) -> Callable[[], str]:
        BLOCKS[name] = write
        return write

    return register


def fill(text: str) -> str:
    """A page with all of its blocks written anew."""

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"blocks are {', '.join(sorted(BLOCKS))}; a page asks for {name!r}")
        return f"{begin}\n{BLOCKS[name]().strip()}\n\n{end}"

    return PATTERN.sub(replace, text)


def pages(root: Path) -> list[Path]:
    """The pages that may have blocks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
