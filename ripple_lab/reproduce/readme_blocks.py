"""The README's three tables: speed by tokens, what runs where, and accuracy beside the paper's."""

from collections.abc import Iterable

from ripple_lab.paper import ACCURACY, TOP1_OF_TABLE_8
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table, rounded, short
from ripple_lab.reproduce.queries import Seeds, at_epochs
from ripple_lab.results import Row, committed_results

NOT_YET = "not yet run"
PASSES = ("forward", "forward+backward")
# A heading, the system of `ripple bench layer`, and that of `ripple bench op`, if it has one.
SPEED_COLUMNS = (
    ("softmax", "softmax", "softmax SDPA"),
    ("Windows of 14×14", "windows 14", ""),
    ("FlexAttention, 7×7", "flex 7x7", ""),
    ("linear (PyTorch)", "linear", "linear attention"),
    ("ripple, R_max 4", "ripple R 4", "ripple tiled triton"),
)
RESULT_ROWS = (
    ("DeiT (softmax)", "cifar100-deit-tiny"),
    ("DeiT-LA (linear)", "cifar100-deit-la-tiny"),
    ("ConViT (softmax)", "cifar100-convit-tiny"),
    ("ripple", "cifar100-ripple-tiny"),
    ("ripple, 4 layers", "cifar100-ripple-tiny4"),
)


@block("readme-speed")
def speed_by_tokens() -> str:
    """Layers where `ripple bench layer` has run on a GPU, else the operators alone."""
    layers = [row for row in committed_results().of_kind("layers") if _on_gpu(row)]
    if layers:
        rows = [row for row in layers if _shape(row) in _shown_shapes(layers)]
        return _speed_table(rows, [(heading, name) for heading, name, _ in SPEED_COLUMNS], "layers")
    rows = [
        row
        for row in committed_results().of_kind("operators")
        if _on_gpu(row) and row["dtype"] == "bfloat16" and row["max_distance"] == 4
        and row["head_dim"] == 32
    ]  # fmt: skip
    columns = [(heading, name) for heading, _, name in SPEED_COLUMNS if name]
    absent = [heading for heading, _, name in SPEED_COLUMNS if not name]
    table = _speed_table(rows, columns, "attention after the projections")
    return f"{table} {listed(absent)}: not yet run (`ripple bench layer --device cuda`)."


@block("readme-results")
def accuracy() -> str:
    """Top-1 of the paper and of ours after 300 and 60 epochs."""
    rows, departed = [], {}
    for label, recipe in RESULT_ROWS:
        paper = ACCURACY[recipe][0] if recipe in ACCURACY else TOP1_OF_TABLE_8[recipe]
        ours = [at_epochs(recipe, epochs, committed_results()) for epochs in (300, 60)]
        rows.append([label, rounded(paper, 1), *map(seeds_text, ours)])
        for seeds in filter(None, ours):
            departed.setdefault((seeds.epochs, departures_text(seeds)), []).append(label)
    headings = ("CIFAR-100, top-1 %", "paper, 300 epochs", "ours, 300 epochs", "ours, 60 epochs")
    said = []
    for (epochs, text), labels in departed.items():
        everyone = labels == [row[0] for row in rows if row[{300: 2, 60: 3}[epochs]] != NOT_YET]
        who = "" if everyone else f", {listed(labels)}"
        said += [f"{epochs} epochs{who}: {text}."] if text else []
    note = f"Departures from the paper's recipe: {' '.join(said)}" if said else ""
    return f"{markdown_table(headings, rows)}\n\n{note} One seed unless it says more."


def seeds_text(seeds: Seeds | None, metric: str = "top1") -> str:
    """The mean; of several seeds their number."""
    if seeds is None:
        return NOT_YET
    count = len(seeds.runs)
    said = seeds.text(metric).partition(",")[0]
    return f"{said} ({count} seeds)" if count > 1 else said


def departures_text(seeds: Seeds) -> str:
    """Where runs left the paper's recipe, but for the epochs."""
    changes = seeds.departures.items()
    return ", ".join(f"`{name}` {change}" for name, change in changes if name != "epochs")


def _on_gpu(row: Row) -> bool:
    return "NVIDIA" in row["hardware"]


def _shape(row: Row) -> tuple[int, int, int, int]:
    return row["tokens"], row["batch"], row["heads"], row.get("dim", 0)


def _shown_shapes(rows: Iterable[Row]) -> list[tuple[int, int, int, int]]:
    """Of each number of tokens the first shape with heads of 64 channels, else the first."""
    chosen: dict[int, Row] = {}
    for row in rows:
        known = chosen.get(row["tokens"])
        if known is None or (row["head_dim"] == 64 and known["head_dim"] != 64):
            chosen[row["tokens"]] = row
    return [_shape(row) for row in chosen.values()]


def _speed_table(rows: list[Row], columns: list[tuple[str, str]], what: str) -> str:
    times = {(_shape(row), row["system"], row["pass"]): row["median_ms"] for row in rows}
    lines = []
    for shape in sorted({_shape(row) for row in rows}):
        cells = [
            " / ".join(short(times.get((shape, system, step))) for step in PASSES)
            for _, system in columns
        ]
        lines.append([f"{shape[0]:,} ({shape[1]})", *cells])
    table = markdown_table(["tokens (batch)", *(heading for heading, _ in columns)], lines)
    first = rows[0]
    widths = listed(sorted({f"{row['heads']} heads of {row['head_dim']} channels" for row in rows}))
    return (
        f"{table}\n\nMilliseconds, forward / forward and backward; {what}, {widths}, "
        f"{first['dtype']}, {first['hardware']}."
    )
