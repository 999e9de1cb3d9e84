"""`make results`: writes the blocks of README and docs."""

from pathlib import Path

from ripple_lab.reproduce.blocks import write_pages

write_pages(Path(__file__).parents[2])
