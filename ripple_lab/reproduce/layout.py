"""The form of a table: rows, the paper's numbers in them, and where ours come from."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ripple_lab.reproduce.found import Results
from ripple_lab.reproduce.speeds import Line
from ripple_lab.reproduce.values import Value


@dataclass(frozen=True)
class TableRow:
    """One row.

    Args:
        label: What the paper calls it.
        paper: The paper's numbers by the name of their column.
        facts: What the paper says of it in words.
        recipe: Whose training makes ours.
        model: Whose size is ours.
        positions: Whether the model has position embeddings.
        system: Of `ripple bench model`, whose speed is ours.
        line: Of `ripple bench op`, whose growth is ours.
    """

    label: str
    paper: dict[str, float] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    recipe: str | None = None
    model: str | None = None
    positions: bool = True
    system: str | None = None
    line: Line | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Args:
        name: As the command takes it.
        title: Number and subject.
        setting: How the paper measured, and how ours are to be read.
        columns: Names of columns, of `COLUMNS`.
        rows: Its rows.
        subject: What a row is of.
        facts: Headings of what is said in words.
        drawn: The column of the figure.
        tokens: Of the models whose speed it gives.
    """

    name: str
    title: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    subject: str = "model"
    facts: tuple[str, ...] = ()
    drawn: str = "top1"
    tokens: int = 0


@dataclass(frozen=True)
class Column:
    """A column: its heading, the decimals of the paper's numbers and of ours, and who makes ours.

    `ours` takes a table and all results and gives a value for each row.
    """

    heading: str
    decimals: tuple[int, int]
    ours: Callable[[PaperTable, Results], list[Value]]
    trained: bool = False
