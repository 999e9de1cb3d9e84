"""The README's table on speed: layers where they were measured, else the operators alone."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table, short
from ripple_lab.results import Row, committed_results

PASSES = ("forward", "forward+backward")
# A heading, the system of `ripple bench layer`, and that of `ripple bench op`, if it has one.
COLUMNS = (
    ("softmax", "softmax", "softmax SDPA"),
    ("windows of 14×14", "windows 14", ""),
    ("FlexAttention, 7×7", "flex 7x7", ""),
    ("linear", "linear", "linear attention"),
    ("ripple, R_max 4", "ripple R 4", "ripple tiled triton"),
)


@block("readme-speed")
def speed_by_tokens() -> str:
    """A line for each number of tokens."""
    layers = [row for row in committed_results().of_kind("layers") if "NVIDIA" in row["hardware"]]
    if layers:
        shapes: dict[int, Row] = {}  # of each number of tokens the first with heads of 64 channels
        for row in layers:
            known = shapes.setdefault(row["tokens"], row)
            if row["head_dim"] == 64 != known["head_dim"]:
                shapes[row["tokens"]] = row
        keys = ("file", "dim", "heads", "batch")
        rows = [r for r in layers if all(r[key] == shapes[r["tokens"]][key] for key in keys)]
        said = "layers of " + listed([f"{r['dim']} channels ({r['tokens']:,} tokens)"
                                      for r in shapes.values()])  # fmt: skip
        return _table(rows, [(heading, layer) for heading, layer, _ in COLUMNS], said)
    rows = [
        row
        for row in committed_results().of_kind("operators")
        if "NVIDIA" in row["hardware"] and row["head_dim"] == 32 and row["max_distance"] == 4
    ]
    absent = listed([heading for heading, _, name in COLUMNS if not name])
    table = _table(
        rows,
        [(heading, name) for heading, _, name in COLUMNS if name],
        "attention after the projections, linear attention in PyTorch operations",
    )
    return f"{table} Not yet run: {absent}."


def _table(rows: list[Row], columns: list[tuple[str, str]], said: str) -> str:
    cells = {
        (row["tokens"], row["batch"], row["system"], row["pass"]): short(row["median_ms"])
        for row in rows
    }
    lines = [
        [f"{size:,} ({batch})"]
        + [
            " / ".join(cells.get((size, batch, name, p), "–") for p in PASSES)
            for _, name in columns
        ]
        for size, batch in sorted({(row["tokens"], row["batch"]) for row in rows})
    ]
    files = listed([f"`{file}`" for file in dict.fromkeys(row["file"] for row in rows)])
    headings = ["tokens (batch)", *(heading for heading, _ in columns)]
    return (
        f"{markdown_table(headings, lines)}\n\nMilliseconds, forward / forward and backward; "
        f"{said}; {rows[0]['dtype']}, {rows[0]['hardware']}; {files}."
    )
