"""The README's section of results, made of the result files."""

from pathlib import Path

from ripple_lab.files import replace_text
from ripple_lab.reproduce.columns import COLUMNS
from ripple_lab.reproduce.found import FOLDER, Results, read_results
from ripple_lab.reproduce.layout import PaperTable
from ripple_lab.reproduce.pages import Filled, grid, sources
from ripple_lab.reproduce.tables import OURS, TABLES
from ripple_lab.reproduce.values import Measured

BEGIN = "<!-- results: made by `make results`; edits here are lost -->"
END = "<!-- end of results -->"


def results_section(results: Results) -> str:
    """Of each table the rows that were trained, beside the paper's numbers.

    A table whose rows were all shown before is left out.
    """
    parts: list[str] = []
    shown: set[str | None] = set()
    for table in TABLES:
        columns = tuple(name for name in table.columns if COLUMNS[name].trained)
        filled = {name: COLUMNS[name].ours(table, results) for name in columns}
        rows = _trained_rows(filled, len(table.rows))
        recipes = {table.rows[number].recipe for number in rows}
        if recipes - shown:
            shown |= recipes
            parts.append(f"**{table.title}**\n\n{grid(table, filled, rows, columns)}")
            parts.append("\n".join(f"- {line}" for line in _linked(table, filled)))
    if not parts:
        parts = ["Nothing is trained yet."]
    parts.append(
        f"{OURS} `ripple reproduce all` writes every table and figure of the paper, ours beside "
        "it, with the command for each number that is not there yet."
    )
    return "\n\n".join(parts)


def replace_section(text: str, section: str) -> str:
    """A text with what stands between its two markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"the section of results stands between two lines, {BEGIN} and {END}; one is missing: "
            "put both where the section shall be"
        )
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def write_section(readme: Path = Path("README.md"), folder: Path = FOLDER) -> None:
    """Brings a README's section of results up to date with the files."""
    section = results_section(read_results(folder))
    replace_text(readme, replace_section(readme.read_text(encoding="utf-8"), section))


def _trained_rows(filled: Filled, count: int) -> list[int]:
    return [
        number
        for number in range(count)
        if any(isinstance(values[number], Measured) for values in filled.values())
    ]


def _linked(table: PaperTable, filled: Filled) -> list[str]:
    """The sources, with their files as links."""
    files = {
        file
        for values in filled.values()
        for value in values
        if isinstance(value, Measured)
        for part in value.parts()
        for file in part.files
    }
    lines = sources(table, filled)
    for file in files:
        address = (FOLDER / file).as_posix()
        address = f"<{address}>" if " " in address else address
        target = f"[{file}]({address})"
        lines = [line.replace(f"`{file}`", target) for line in lines]
    return lines


if __name__ == "__main__":
    write_section()
