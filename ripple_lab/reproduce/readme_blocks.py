"""Two of the README's tables: speed by tokens, and accuracy beside the paper's."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.cifar_blocks import (
    FULL,
    PAPER_TOP1,
    SHORT,
    departures_note,
    seeds_text,
)
from ripple_lab.reproduce.markdown import listed, markdown_table, rounded
from ripple_lab.reproduce.queries import at_epochs
from ripple_lab.reproduce.timing import layers_on_gpu, measured_on, timing_table
from ripple_lab.results import Row, committed_results

# A heading, the system of `ripple bench layer`, and that of `ripple bench op`, if it has one.
SPEED_COLUMNS = (
    ("softmax", "softmax", "softmax SDPA"),
    ("windows of 14×14", "windows 14", ""),
    ("FlexAttention, 7×7", "flex 7x7", ""),
    ("linear", "linear", "linear attention"),
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
    said = "Milliseconds, forward / forward and backward"
    if layers := layers_on_gpu():
        rows = [row for row in layers if _shape(row) in _shown_shapes(layers)]
        systems = [(heading, layer) for heading, layer, _ in SPEED_COLUMNS]
        return f"{timing_table(rows, systems)}\n\n{said}, of layers; {measured_on(rows)}."
    rows = [
        row
        for row in committed_results().of_kind("operators")
        if "NVIDIA" in row["hardware"] and row["head_dim"] == 32 and row["max_distance"] == 4
    ]
    systems = [(heading, name) for heading, _, name in SPEED_COLUMNS if name]
    absent = listed([heading for heading, _, name in SPEED_COLUMNS if not name])
    return (
        f"{timing_table(rows, systems)}\n\n{said}, of attention after the projections, linear "
        f"attention in PyTorch operations; {measured_on(rows)}. Not yet run: {absent}."
    )


@block("readme-results")
def accuracy() -> str:
    """Top-1 of the paper and of ours after 300 and 60 epochs."""
    rows, runs = [], []
    for label, recipe in RESULT_ROWS:
        ours = [at_epochs(recipe, epochs, committed_results()) for epochs in (FULL, SHORT)]
        rows.append([label, rounded(PAPER_TOP1[recipe], 1), *map(seeds_text, ours)])
        runs += [(label, seeds) for seeds in ours]
    headings = ["CIFAR-100, top-1 %", "paper, 300 epochs"]
    headings += [f"ours, {epochs} epochs" for epochs in (FULL, SHORT)]
    return f"{markdown_table(headings, rows)}\n\n{departures_note(runs)}"


def _shape(row: Row) -> tuple[int, int, int]:
    return row["tokens"], row["dim"], row["heads"]


def _shown_shapes(rows: list[Row]) -> list[tuple[int, int, int]]:
    """Of each number of tokens the first shape with heads of 64 channels, else the first."""
    chosen: dict[int, Row] = {}
    for row in rows:
        known = chosen.setdefault(row["tokens"], row)
        if row["head_dim"] == 64 != known["head_dim"]:
            chosen[row["tokens"]] = row
    return [_shape(row) for row in chosen.values()]
