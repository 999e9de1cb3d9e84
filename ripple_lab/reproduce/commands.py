"""`ripple reproduce`: tables and figures by name, into a folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from ripple_lab.console import did_you_mean
from ripple_lab.files import replace_text
from ripple_lab.reproduce import figures
from ripple_lab.reproduce.pages import make_table
from ripple_lab.reproduce.tables import TABLES
from ripple_lab.results import Results

EVERYTHING = "all"
Make = Callable[[Results, Path], figures.Made]

CATALOGUE: dict[str, tuple[str, Make]] = {
    **{table.name: (table.title, partial(make_table, table)) for table in TABLES},
    "figure-1": ("Figure 1: rings, their weights and a halted ripple", figures.make_figure_1),
    **{
        curves.name: (curves.title, partial(figures.make_curves, curves))
        for curves in (figures.SPEED, figures.PARTITIONS)
    },
    "figure-jsd": ("Figure: JSD of the spatial weights in training", figures.make_divergence),
}


def find_names(names: list[str]) -> list[str]:
    """The names that were asked for, `all` spelt out, each once."""
    for name in names:
        if name not in (*CATALOGUE, EVERYTHING):
            hint = did_you_mean(name, [*CATALOGUE, EVERYTHING])
            raise ValueError(
                f"there is no table or figure {name!r}: {hint}`ripple reproduce --list` shows all"
            )
    return list(CATALOGUE) if EVERYTHING in names else list(dict.fromkeys(names))


def list_all(console: Console) -> None:
    """Prints what can be reproduced."""
    for name, (title, _) in [*CATALOGUE.items(), (EVERYTHING, ("all: every one of them", None))]:
        console.print(f"{name:<24} {title.partition(': ')[2]}", highlight=False)


def reproduce(
    names: list[str], output: Path, console: Console, results: Path | None = None
) -> dict[str, list[str]]:
    """Writes NAME.md for each name, and NAME.png and NAME.svg where there is something to draw.

    Args:
        names: Of `CATALOGUE`, or "all".
        output: The folder to write to.
        console: Where the tables are shown.
        results: The folder of result files; that of this package unless given.

    Returns:
        By name, what is missing, each with the command that makes it.
    """
    chosen = find_names(names)
    found, lacking = Results(results), {}
    output.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        _, make = CATALOGUE[name]
        with console.status(name):
            text, lacking[name] = make(found, output)
        replace_text(output / f"{name}.md", text)
        if len(chosen) == 1:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{name} {len(lines)}" for name, lines in lacking.items() if lines)
    console.print(f"Written to {output}, as Markdown, PNG and SVG.", highlight=False)
    console.print(f"Numbers that are not there yet: {counts or 'none'}.", highlight=False)
    return lacking
