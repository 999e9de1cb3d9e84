"""Tables of times and memory: a line for each size, a column for each system."""

from collections.abc import Sequence

from ripple_lab.reproduce.markdown import listed, markdown_table, short
from ripple_lab.results import Row, committed_results

PASSES = ("forward", "forward+backward")
STEPS = ("forward", "training step")
Systems = Sequence[tuple[str, str]]  # a heading, and the name in the file


def timing_table(
    rows: Sequence[Row],
    systems: Systems,
    passes: Sequence[str] = PASSES,
    quantity: str = "median_ms",
    scale: float = 1,
) -> str:
    """Cells hold all passes, a slash between them; a pass that could not run says why.

    Args:
        rows: Of one benchmark and machine.
        systems: The columns.
        passes: What a cell holds.
        quantity: The column of the file.
        scale: By which numbers are multiplied.
    """

    def size(row: Row) -> str:
        tall = row["height"] != row["width"] if "height" in row else False
        tokens = f"{row['height']}×{row['width']}" if tall else f"{row['tokens']:,}"
        return f"{tokens} ({row['batch']})"

    cells = {
        (size(row), row["system"], row["pass"]): short(scale * row[quantity])
        if row.get(quantity)
        else (row["status"] or "–").partition(":")[0]
        for row in rows
    }
    lines = {size(row): row["tokens"] for row in sorted(rows, key=lambda row: row["tokens"])}
    names = [name for _, name in systems]
    table = [[line, *(_joined([cells.get((line, name, p), "–") for p in passes]) for name in names)]
             for line in lines]  # fmt: skip
    return markdown_table(["tokens (batch)", *(heading for heading, _ in systems)], table)


def layers_on_gpu() -> list[Row]:
    """The rows of `ripple bench layer` on an NVIDIA GPU, of one file."""
    rows = [r for r in committed_results().of_kind("layers") if "NVIDIA" in r["hardware"]]
    return [row for row in rows if row["file"] == rows[0]["file"]]


def measured_on(rows: Sequence[Row]) -> str:
    """Type, machine and files: "bfloat16, NVIDIA H200; `op-….csv`"."""
    said = dict.fromkeys(f"{row['dtype']}, {row['hardware']}" for row in rows)
    files = dict.fromkeys(f"`{row['file']}`" for row in rows)
    return f"{listed(list(said))}; {listed(list(files))}"


def _joined(cells: list[str]) -> str:
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)
