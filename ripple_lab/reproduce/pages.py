"""A table as Markdown: the paper's numbers beside ours, where ours come from, what is missing."""

from ripple_lab.reproduce.columns import COLUMNS
from ripple_lab.reproduce.found import Results
from ripple_lab.reproduce.layout import PaperTable
from ripple_lab.reproduce.values import Measured, Value, remedy

Filled = dict[str, list[Value]]


def fill(table: PaperTable, results: Results) -> Filled:
    """Our values of each column, one for each row."""
    return {name: COLUMNS[name].ours(table, results) for name in table.columns}


def page(table: PaperTable, filled: Filled) -> str:
    """A whole page."""
    parts = [f"# {table.title}", table.setting, grid(table, filled)]
    parts.append(f"![{table.title}]({table.name}.png)")
    found, lacking = sources(table, filled), missing(table, filled)
    if found:
        parts.append("## Where ours come from\n\n" + "\n".join(f"- {line}" for line in found))
    if lacking:
        parts.append("## Not there yet\n\n" + "\n".join(f"- {line}" for line in lacking))
        parts.append(
            "`ripple results RUN … --output benchmarks/results/NAME.csv` then puts finished runs "
            "where this command looks; benchmarks write there by themselves."
        )
    return "\n\n".join(parts) + "\n"


def grid(
    table: PaperTable,
    filled: Filled,
    rows: list[int] | None = None,
    columns: tuple[str, ...] | None = None,
) -> str:
    """The table itself; some of its rows and columns alone, where asked."""
    columns = columns or table.columns
    headings = [table.subject, *table.facts]
    for name in columns:
        heading = COLUMNS[name].heading
        headings += [f"{heading}, paper"] * _in_paper(table, name) + [f"{heading}, ours"]
    words = 1 + len(table.facts)
    lines = [headings, ["---"] * words + ["---:"] * (len(headings) - words)]
    for number in range(len(table.rows)) if rows is None else rows:
        row = table.rows[number]
        cells = [row.label, *row.facts]
        for name in columns:
            papers, ours = COLUMNS[name].decimals
            if _in_paper(table, name):
                cells.append(f"{row.paper[name]:,.{papers}f}" if name in row.paper else "–")
            cells.append(filled[name][number].text(ours))
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sources(table: PaperTable, filled: Filled) -> list[str]:
    """For each row of ours what it was measured on; the same words once."""
    rows: dict[str, list[str]] = {}
    for values in filled.values():
        for row, value in zip(table.rows, values, strict=True):
            for part in value.parts() if isinstance(value, Measured) else []:
                if part.source:
                    labels = rows.setdefault(part.source, [])
                    label = row_label(table, row.label, row.facts)
                    label += f" (`{part.recipe}`)" if part.recipe else ""
                    labels += [label] if label not in labels else []
    return [f"{', '.join(labels)}: {source}" for source, labels in rows.items()]


def missing(table: PaperTable, filled: Filled) -> list[str]:
    """For each row that lacks a number, or departs, the commands that make it, or why none does."""
    rows: dict[str, list[str]] = {}
    for values in filled.values():
        for row, value in zip(table.rows, values, strict=True):
            if remedy(value):
                labels = rows.setdefault(remedy(value), [])
                label = row_label(table, row.label, row.facts)
                labels += [label] if label not in labels else []
    return [f"{'; '.join(labels)}: {words}" for words, labels in rows.items()]


def _in_paper(table: PaperTable, name: str) -> bool:
    return any(name in row.paper for row in table.rows)


def row_label(table: PaperTable, label: str, facts: tuple[str, ...]) -> str:
    """A row's name, with what tells it from others of that name."""
    if sum(row.label == label for row in table.rows) == 1:
        return label
    return f"{label}, {table.facts[-1]} {facts[-1]}"
