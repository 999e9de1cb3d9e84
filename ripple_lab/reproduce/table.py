"""A table of the paper: what it declares, and the one way it becomes Markdown."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ripple_lab.reproduce.markdown import markdown_table, rounded
from ripple_lab.results import Results


@dataclass(frozen=True)
class Number:
    """A number of ours, or, without numbers, one that is not there yet."""

    numbers: tuple[float, ...] = ()  # one, or one for each seed
    notes: tuple[str, ...] = ()  # where it left the paper's setting: "60 epochs"
    source: str = ""  # what it is of: epochs, seeds, hardware, file
    command: str = ""  # makes it, where it is missing or left the paper's setting

    @property
    def mean(self) -> float:
        return sum(self.numbers) / len(self.numbers)

    def text(self, decimals: int) -> str:
        """Mean, range and notes.

        >>> Number((44.1, 43.5), ("20 epochs",)).text(1)
        '43.8, 43.5–44.1 (2 seeds, 20 epochs)'
        >>> Number((5770.0,)).text(0), Number(command="ripple train").text(1), Number().text(1)
        ('5,770', 'not yet run', '–')
        """
        if not self.numbers:
            return "not yet run" if self.command else "–"
        shown, notes = rounded(self.mean, decimals), list(self.notes)
        if len(self.numbers) > 1:
            least, most = (rounded(x, decimals) for x in (min(self.numbers), max(self.numbers)))
            shown += f", {least}–{most}"
            notes.insert(0, f"{len(self.numbers)} seeds")
        return shown + (f" ({', '.join(notes)})" if notes else "")


Cell = tuple[Number, ...]  # one number, or that at full length and that at the others' epochs


@dataclass(frozen=True)
class TableRow:
    """A row: the paper's name for it, its numbers by column, and what ours are of."""

    label: str
    paper: dict[str, float] = field(default_factory=dict)
    facts: tuple[str, ...] = ()  # what it says in words, one for each of the table's `facts`
    recipe: str = ""  # whose training and network are ours
    system: tuple[str, ...] = ()  # of a benchmark; the first that was measured
    growing: bool = False  # whether R_max grows with the grid: one less than its side


@dataclass(frozen=True)
class Table:
    """A table of the paper."""

    name: str  # as the command takes it
    title: str  # number and subject
    setting: str  # how the paper measured
    columns: tuple[str, ...]  # of `COLUMNS`
    rows: tuple[TableRow, ...]
    subject: str = "model"  # what a row is of
    facts: tuple[str, ...] = ()  # headings of what is said in words
    drawn: tuple[str, ...] = ("top1",)  # one column, or one against the other
    tokens: int = 0  # of the models whose speed it gives

    def name_of(self, row: TableRow) -> str:
        """A row's label, with what tells it from others of that label."""
        same = sum(other.label == row.label for other in self.rows)
        return row.label if same == 1 else f"{row.label}, {self.facts[-1]} {row.facts[-1]}"


@dataclass(frozen=True)
class Column:
    """A heading, the decimals of the paper's numbers and of ours, and the query that finds ours.

    `ours` takes a table and the results and gives a cell for each row.
    """

    heading: str
    decimals: tuple[int, int]
    ours: Callable[[Table, Results], list[Cell]]


Filled = dict[str, list[Cell]]


def grid(table: Table, columns: dict[str, Column], filled: Filled) -> str:
    """The table in Markdown, the paper's numbers beside ours."""
    headings = [table.subject, *table.facts]
    rows = [[row.label, *row.facts] for row in table.rows]
    for name in table.columns:
        column, in_paper = columns[name], any(name in row.paper for row in table.rows)
        paper, ours = column.decimals
        headings += [f"{column.heading}, paper"] * in_paper + [f"{column.heading}, ours"]
        for cells, row, cell in zip(rows, table.rows, filled[name], strict=True):
            theirs = rounded(row.paper[name], paper) if name in row.paper else "–"
            cells += [theirs] * in_paper + ["; ".join(number.text(ours) for number in cell)]
    return markdown_table(headings, rows, words=1 + len(table.facts))


def grouped(said: Iterable[tuple[str, str]], everyone: int = 0) -> list[str]:
    """A line for each text, with the names it is about; "All" if there are `everyone` of these."""
    found: dict[str, dict[str, None]] = {}
    for text, name in said:
        found.setdefault(text, {})[name] = None
    return [
        f"{'All' if len(names) == everyone else '; '.join(names)}: {text}"
        for text, names in found.items()
        if text
    ]


def by_row(table: Table, filled: Filled) -> list[tuple[Number, str]]:
    """Every number of ours, with the name of its row."""
    cells = [zip(cells, table.rows, strict=True) for cells in filled.values()]
    return [(n, table.name_of(row)) for column in cells for cell, row in column for n in cell]


def sources(table: Table, filled: Filled) -> list[str]:
    """What our numbers were measured on."""
    return grouped((n.source, name) for n, name in by_row(table, filled) if n.numbers)


def missing(table: Table, filled: Filled) -> list[str]:
    """The commands of numbers that are not there, or not in the paper's setting."""
    return grouped(
        ("in the paper's setting, " * bool(n.numbers) + f"not yet run: `{n.command}`", name)
        for n, name in by_row(table, filled)
        if n.command
    )
