"""Blocks of README and docs that are written from result files, by `make results`.

A block stands between two comments, `<!-- results: NAME -->` and `<!-- end of results -->`. Its
text is what the function of that name in `BLOCKS` returns.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from ripple_lab.files import replace_text

BLOCKS: dict[str, Callable[[], str]] = {}
PATTERN = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
# The modules that register blocks.
MODULES = (
    "readme_blocks",
    "cifar_blocks",
    "support",
    "page_blocks",
    "detection_blocks",
    "claims",
    "convert_blocks",
    "drill_blocks",
)


def block(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function that writes the block of some name."""

    def register(write: Callable[[], str]) -> Callable[[], str]:
        BLOCKS[name] = write
        return write

    return register


def known_blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name."""
    for name in MODULES:
        importlib.import_module(f"{__package__}.{name}")
    return BLOCKS


def fill(text: str) -> str:
    """A page with all of its blocks written anew."""
    known = known_blocks()

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in known:
            raise ValueError(f"blocks are {', '.join(sorted(known))}; a page asks for {name!r}")
        return f"{begin}{known[name]().strip()}\n{end}"

    return PATTERN.sub(replace, text)


def pages(root: Path) -> list[Path]:
    """The pages that may have blocks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def write_pages(root: Path) -> None:
    """Brings every block of every page up to date."""
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            replace_text(path, filled)
            print(f"wrote {path.relative_to(root)}")
