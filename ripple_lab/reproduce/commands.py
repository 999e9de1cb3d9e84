"""`ripple reproduce`: tables and figures by name, into a folder."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ripple_lab.console import did_you_mean
from ripple_lab.files import replace_text
from ripple_lab.reproduce.charts import draw_table
from ripple_lab.reproduce.figures import PARTITIONS, SPEED, make_curves, make_divergence
from ripple_lab.reproduce.found import FOLDER, Results, read_results
from ripple_lab.reproduce.layout import PaperTable
from ripple_lab.reproduce.pages import fill, missing, page
from ripple_lab.reproduce.tables import TABLES

EVERYTHING = "all"
Make = Callable[[Results, Path], tuple[str, list[str]]]


def make_table(table: PaperTable, results: Results, folder: Path) -> tuple[str, list[str]]:
    """Draws a table; gives its page, and what is missing."""
    filled = fill(table, results)
    draw_table(table, filled, folder)
    return page(table, filled), missing(table, filled)


def catalogue() -> dict[str, tuple[str, Make]]:
    """What can be reproduced: by name its title, and what makes it."""
    made: dict[str, tuple[str, Make]] = {
        table.name: (table.title, lambda results, folder, t=table: make_table(t, results, folder))  # type: ignore[misc]
        for table in TABLES
    }
    for curves in (SPEED, PARTITIONS):
        made[curves.name] = (
            curves.title,
            lambda results, folder, c=curves: make_curves(c, results, folder),  # type: ignore[misc]
        )
    made["figure-jsd"] = "Figure: JSD of the spatial weights in training", make_divergence
    return made


def find_names(names: list[str]) -> list[str]:
    """The names that were asked for, `all` spelt out, each once."""
    known = catalogue()
    for name in names:
        if name not in (*known, EVERYTHING):
            hint = did_you_mean(name, [*known, EVERYTHING])
            raise ValueError(
                f"there is no table or figure {name!r}: {hint}`ripple reproduce --list` shows all"
            )
    return list(known) if EVERYTHING in names else list(dict.fromkeys(names))


def list_all(console: Console) -> None:
    """Prints what can be reproduced."""
    table = Table(box=None)
    table.add_column("name", no_wrap=True)
    table.add_column("shows")
    for name, (title, _) in catalogue().items():
        table.add_row(name, title.partition(": ")[2])
    table.add_row(EVERYTHING, "every table and figure")
    console.print(table)


def reproduce(
    names: list[str], output: Path, console: Console, results: Path = FOLDER
) -> dict[str, list[str]]:
    """Writes NAME.md, NAME.png and NAME.svg for each name.

    Args:
        names: Of `catalogue`, or "all".
        output: The folder to write to.
        console: Where the tables are shown.
        results: The folder of result files.

    Returns:
        By name, what is missing, each with the command that makes it.
    """
    chosen = find_names(names)
    found, lacking = read_results(results), {}
    output.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        _, make = catalogue()[name]
        with console.status(name):
            text, lacking[name] = make(found, output)
        replace_text(output / f"{name}.md", text)
        if len(chosen) == 1:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    summary = Table(title=f"Written to {output}, as Markdown, PNG and SVG", title_justify="left")
    summary.add_column("name", no_wrap=True)
    summary.add_column("not there yet", justify="right")
    for name, lines in lacking.items():
        summary.add_row(name, str(len(lines)) if lines else "–")
    console.print(summary)
    return lacking
