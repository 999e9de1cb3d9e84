"""Benchmark rows as numbers and curves: one machine and one setting for all that is compared."""

import math
import shlex
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ripple_lab.paper import FIGURE_BATCH, FIGURE_WIDTH, SPEED_BATCH
from ripple_lab.reproduce.table import Cell, Number, Table, TableRow
from ripple_lab.results import Results, Row

HEADS, MODEL_WIDTH, MAX_DISTANCE = 6, 192, 4  # of the paper's tiny models
FIT_FROM = 1024  # tokens; below, fixed costs hide how time grows
GROWING_SIDES, OPERATOR_SIDES, FIGURE_SIDES = (32, 64, 128), (32, 64, 128, 256), (16, 32, 64, 128)
FIGURE_SETTING = {"batch": FIGURE_BATCH, "width": FIGURE_WIDTH}
RESULTS = "benchmarks/results"

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Setting:
    """The rows of one machine and setting, and where that left the paper's."""

    rows: list[Row]
    departs: tuple[str, ...]

    @property
    def words(self) -> str:
        """Hardware, precision, sizes and files of what was measured."""
        first = self.rows[0]
        words = [first["hardware"], first["dtype"], f"batch {first['batch']}"]
        if "head_dim" in first:
            words.append(f"{first['heads']} heads of {first['head_dim']} channels")
        elif "part" not in first:
            words.append(f"width {_width(first)}")
            words.append("compiled" if first.get("compiled") else "not compiled")
        files = ", ".join(f"`{file}`" for file in sorted({row["file"] for row in self.rows}))
        return f"{', '.join(words)}; {files}"


def images_per_second(table: Table, results: Results) -> list[Cell]:
    """Speed of whole models, forward, all on one machine."""
    names = list(dict.fromkeys(row.system[0] for row in table.rows))
    rows = [
        row
        for row in results.of_kind("models")
        if row["system"] in names and row["tokens"] == table.tokens
        and (row["status"], row["pass"]) == ("ok", "forward")
    ]  # fmt: skip
    chosen = nearest(rows, {"batch": SPEED_BATCH, "width": MODEL_WIDTH}, systems_of)
    side = math.isqrt(table.tokens)
    shape = f"--sides {side} --batch {SPEED_BATCH} --forward-alone"
    command = model_command(shape, names, f"{table.name}-side-{side}")
    return [_measured(chosen, row.system[0], "images_per_second", 1, command) for row in table.rows]


def seconds(table: Table, results: Results) -> list[Cell]:
    """Seconds that a detector takes for one image, all on one machine."""
    rows = [
        row
        for row in results.of_kind("detectors")
        if (row["part"], row["pass"], row["status"]) == ("detector", "forward", "ok")
        and row["batch"] == 1
    ]
    chosen, command = nearest(rows, {}, len), "ripple bench detection --grids none"
    return [_measured(chosen, row.system[0], "median_ms", 1e-3, command) for row in table.rows]


def growth(step: str, quantity: str) -> Callable[[Table, Results], list[Cell]]:
    """The power of the number of tokens by which time or memory of operators grows."""

    def ours(table: Table, results: Results) -> list[Cell]:
        setting = figure_setting(table.rows, results.of_kind("operators"))
        cells: list[Cell] = []
        for row in table.rows:
            found = points(setting, row, step, quantity)
            power = exponent(found)
            if power is None or setting is None:
                cells.append((Number(command=operator_command(row.growing)),))
            else:
                sizes = ", ".join(f"{tokens:,}" for tokens, _ in found if tokens >= FIT_FROM)
                cells.append((Number((power,), (), f"at {sizes} tokens; {setting.words}"),))
        return cells

    return ours


def model_command(shape: str, systems: Iterable[str], purpose: str) -> str:
    """What times whole models of a shape, given as options."""
    only = shlex.quote(",".join(dict.fromkeys(name.split(", ")[-1] for name in systems)))
    return f"ripple bench model {shape} --only {only} --output {RESULTS}/model-{purpose}.csv"


def figure_command(systems: Iterable[str]) -> str:
    """What times whole models in the setting of the paper's figures; as there, not compiled."""
    sides = ",".join(map(str, FIGURE_SIDES))
    shape = f"--sides {sides} --batch {FIGURE_BATCH} --width {FIGURE_WIDTH} --no-compiled"
    return model_command(shape, systems, f"width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}")


def operator_command(growing: bool = False) -> str:
    """What times the operators by which growth is fitted; growing: R_max = side − 1."""
    shape = f"--batch {FIGURE_BATCH} --heads {HEADS} --head-dim {FIGURE_WIDTH // HEADS}"
    shape += " --dtype bfloat16 --device cuda"
    name = f"{RESULTS}/op-width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}"
    if not growing:
        sides = ",".join(map(str, OPERATOR_SIDES))
        return f"ripple bench op --sides {sides} {shape} --output {name}.csv"
    return "`, `".join(
        f"ripple bench op --sides {side} --max-distance {side - 1} {shape} --only 'table triton' "
        f"--output {name}-dense-{side}.csv"
        for side in GROWING_SIDES
    )


def figure_setting(lines: Sequence[TableRow], rows: list[Row]) -> Setting | None:
    """The rows nearest to the setting of the paper's figures."""
    names = {system for line in lines for system in line.system}

    def covered(group: list[Row]) -> int:
        there = [row for row in group if row["status"] == "ok"]
        return sum(
            len({r["tokens"] for r in there if r["system"] in line.system and _fits(r, line)}) > 1
            for line in lines
        )

    return nearest([row for row in rows if row["system"] in names], FIGURE_SETTING, covered)


def nearest(
    rows: list[Row], wanted: Mapping[str, int], covers: Callable[[list[Row]], int]
) -> Setting | None:
    """Of all machines and settings the one to show; None where none covers anything.

    The one that departs least from what is wanted; then the one that covers most, reaches the
    most tokens, and is the fastest there.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("hardware", "dtype", "batch", "heads", "head_dim"))
        groups.setdefault((*key, _width(row), row.get("compiled")), []).append(row)

    def departs(group: list[Row]) -> tuple[str, ...]:
        has = {"batch": group[0]["batch"], "width": _width(group[0])}
        return tuple(f"{name} {has[name]}" for name in wanted if has[name] != wanted[name])

    def rank(group: list[Row]) -> tuple[int, int, int, float]:
        reach = max(row["tokens"] for row in group)
        slow = sum(row["median_ms"] or math.inf for row in group if row["tokens"] == reach)
        return -len(departs(group)), covers(group), reach, -slow

    best = max((group for group in groups.values() if covers(group)), key=rank, default=None)
    return Setting(best, departs(best)) if best else None


def points(setting: Setting | None, line: TableRow, step: str, quantity: str) -> Points:
    """(tokens, quantity) of a line, the fewest tokens first."""
    for system in line.system:
        found = {
            row["tokens"]: row[quantity]
            for row in (setting.rows if setting else ())
            if row["system"] == system and row["pass"] == step and row.get(quantity)
            and _fits(row, line)
        }  # fmt: skip
        if found:
            return sorted(found.items())
    return []


def refused(setting: Setting | None, line: TableRow, step: str) -> dict[int, str]:
    """Why a line has no point, by the number of tokens."""
    return {
        row["tokens"]: row["status"].partition(":")[0]
        for row in (setting.rows if setting else ())
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


def systems_of(group: list[Row]) -> int:
    """How many systems rows are of."""
    return len({row["system"] for row in group})


def _measured(
    chosen: Setting | None, system: str, quantity: str, unit: float, command: str
) -> Cell:
    for row in chosen.rows if chosen else ():
        if row["system"] == system and chosen:
            source = f"speed: {chosen.words}"
            better = command if chosen.departs else ""
            return (Number((unit * row[quantity],), chosen.departs, source, better),)
    return (Number(command=command),)


def _fits(row: Row, line: TableRow) -> bool:
    """Whether R_max is what a line wants; systems without ripples have none that matters."""
    if "max_distance" not in row or not row["system"].startswith("ripple"):
        return not line.growing
    wanted = math.isqrt(row["tokens"]) - 1 if line.growing else MAX_DISTANCE
    return bool(row["max_distance"] == wanted)


def _width(row: Row) -> int:
    """Channels of a token."""
    if "head_dim" in row:
        return int(row["heads"] * row["head_dim"])
    return int(row.get("embed_dim") or MODEL_WIDTH)
