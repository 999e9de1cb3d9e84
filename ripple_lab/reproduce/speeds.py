"""Benchmark rows as numbers and curves, in the paper's setting and all of one machine."""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ripple_lab.paper import FIGURE_BATCH, FIGURE_WIDTH, SPEED_BATCH
from ripple_lab.reproduce.table import Cell, Number, Table, TableRow
from ripple_lab.results import Results, Row

HEADS, MODEL_WIDTH, MAX_DISTANCE = 6, 192, 4  # of the paper's tiny models
FIT_FROM = 1024  # tokens; below, fixed costs hide how time grows
RESULTS = "benchmarks/results"

Points = list[tuple[int, float]]


def one_machine(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """The rows with these values, all of one machine and precision: those with the most rows."""
    kept = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    counts = Counter((row["hardware"], row["dtype"]) for row in kept if row["status"] == "ok")
    most = max(counts, key=lambda machine: counts[machine], default=None)
    return [row for row in kept if (row["hardware"], row["dtype"]) == most]


def measured_on(rows: Sequence[Row]) -> str:
    """Hardware, precision, sizes and files of what was measured."""
    first = rows[0]
    words = [first["hardware"], first["dtype"], f"batch {first['batch']}"]
    if "head_dim" in first:
        words.append(f"{first['heads']} heads of {first['head_dim']} channels")
    elif "embed_dim" in first:
        compiled = "compiled" if first["compiled"] else "not compiled"
        words += [f"width {first['embed_dim']}", compiled]
    files = sorted({row["file"] for row in rows})
    return f"{', '.join(words)}; {', '.join(f'`{file}`' for file in files)}"


def figure_rows(results: Results, kind: str) -> list[Row]:
    """The rows in the setting of the paper's figures: of "models" or "operators"."""
    width = {"head_dim": FIGURE_WIDTH // HEADS, "heads": HEADS}
    if kind == "models":
        width = {"embed_dim": FIGURE_WIDTH}
    return one_machine(results.of_kind(kind), batch=FIGURE_BATCH, **width)


def images_per_second(table: Table, results: Results) -> list[Cell]:
    """Speed of whole models, forward."""
    wanted = {"tokens": table.tokens, "batch": SPEED_BATCH, "embed_dim": MODEL_WIDTH}
    names = [row.system[0] for row in table.rows]
    named = [row for row in results.of_kind("models") if row["system"] in names]
    rows = one_machine(named, **wanted, **{"pass": "forward"})
    side = math.isqrt(table.tokens)
    shape = f"--sides {side} --batch {SPEED_BATCH} --forward-alone"
    command = model_command(shape, names, f"{table.name}-side-{side}")
    return [_measured(rows, name, "images_per_second", 1, command) for name in names]


def seconds(table: Table, results: Results) -> list[Cell]:
    """Seconds that a detector takes for one image."""
    wanted = {"part": "detector", "pass": "forward", "batch": 1}
    rows = one_machine(results.of_kind("detectors"), **wanted)
    command = "ripple bench detection --grids none"
    return [_measured(rows, row.system[0], "median_ms", 1e-3, command) for row in table.rows]


def growth(step: str, quantity: str) -> Callable[[Table, Results], list[Cell]]:
    """The power of the number of tokens by which time or memory of operators grows."""

    def ours(table: Table, results: Results) -> list[Cell]:
        rows, cells = figure_rows(results, "operators"), list[Cell]()
        for row in table.rows:
            found = points(rows, row, step, quantity)
            power = exponent(found)
            if power is None:
                cells.append((Number(command=operator_command(row.growing)),))
            else:
                sizes = ", ".join(f"{tokens:,}" for tokens, _ in found if tokens >= FIT_FROM)
                source = f"at {sizes} tokens; {measured_on(rows)}"
                cells.append((Number((power,), (), source),))
        return cells

    return ours


def model_command(shape: str, systems: Iterable[str], purpose: str) -> str:
    """What times whole models of a shape, given as options."""
    only = shlex.quote(",".join(dict.fromkeys(name.split(", ")[-1] for name in systems)))
    return f"ripple bench model {shape} --only {only} --output {RESULTS}/model-{purpose}.csv"


def figure_command(lines: Iterable[TableRow]) -> str:
    """What times whole models in the setting of the paper's figures; as there, not compiled."""
    shape = f"--sides 16,32,64,128 --batch {FIGURE_BATCH} --width {FIGURE_WIDTH} --no-compiled"
    purpose = f"width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}"
    return model_command(shape, [line.system[0] for line in lines], purpose)


def operator_command(growing: bool = False) -> str:
    """What times the operators by which growth is fitted; growing: R_max = side − 1."""
    shape = f"--batch {FIGURE_BATCH} --heads {HEADS} --head-dim {FIGURE_WIDTH // HEADS}"
    shape += " --dtype bfloat16 --device cuda"
    name = f"{RESULTS}/op-width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}"
    if not growing:
        return f"ripple bench op --sides 32,64,128,256 {shape} --output {name}.csv"
    return "`, `".join(
        f"ripple bench op --sides {side} --max-distance {side - 1} {shape} --only 'table triton' "
        f"--output {name}-dense-{side}.csv"
        for side in (32, 64, 128)
    )


def points(rows: Iterable[Row], line: TableRow, step: str, quantity: str) -> Points:
    """(tokens, quantity) of the first of a line's systems that was measured."""
    for system in line.system:
        found = {
            row["tokens"]: row[quantity]
            for row in rows
            if row["system"] == system and row["pass"] == step and row.get(quantity)
            and _fits(row, line)
        }  # fmt: skip
        if found:
            return sorted(found.items())
    return []


def refused(rows: Iterable[Row], line: TableRow, step: str) -> dict[int, str]:
    """Why a line has no point, by the number of tokens."""
    return {
        row["tokens"]: row["status"].partition(":")[0]
        for row in rows
        if row["system"] in line.system and row["pass"] == step and row["status"] != "ok"
    }


def exponent(values: Points) -> float | None:
    """k of the power law c·Tᵏ through the points from 1,024 tokens on; None for fewer than two.

    >>> round(exponent([(1024, 3.0), (4096, 12.0)]), 6)
    1.0
    """
    large = [(math.log(x), math.log(y)) for x, y in values if x >= FIT_FROM]
    if len(large) < 2:
        return None
    return statistics.linear_regression(*zip(*large, strict=True)).slope


def _measured(rows: list[Row], system: str, quantity: str, unit: float, command: str) -> Cell:
    for row in rows:
        if row["system"] == system and row[quantity]:
            return (Number((unit * row[quantity],), (), f"speed: {measured_on(rows)}"),)
    return (Number(command=command),)


def _fits(row: Row, line: TableRow) -> bool:
    """Whether R_max is what a line wants; systems without ripples have none that matters."""
    if "max_distance" not in row or not row["system"].startswith("ripple"):
        return not line.growing
    wanted = math.isqrt(row["tokens"]) - 1 if line.growing else MAX_DISTANCE
    return bool(row["max_distance"] == wanted)
