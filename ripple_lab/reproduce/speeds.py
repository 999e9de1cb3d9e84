"""Benchmark rows as numbers and curves: one machine and one setting for all that is compared."""

import math
import shlex
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from ripple_lab.bench.model import SYSTEMS
from ripple_lab.paper import FIGURE_BATCH, FIGURE_WIDTH, SPEED_BATCH
from ripple_lab.reproduce.found import FOLDER, Results, Row
from ripple_lab.reproduce.values import Measured, Missing, Value

HEADS, MODEL_WIDTH = 6, 192  # of the paper's tiny models
MAX_DISTANCE = 4
FIT_FROM = 1024  # tokens; below, fixed costs hide how time grows
GROWING_SIDES = (32, 64, 128)
OPERATOR_SIDES = (32, 64, 128, 256)
FIGURE_SIDES = (16, 32, 64, 128)

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Line:
    """What is drawn or fitted: the first of `systems` that was measured.

    With `growing`, R_max is that of the whole grid: one less than its side.
    """

    label: str
    systems: tuple[str, ...]
    growing: bool = False


@dataclass(frozen=True)
class Setting:
    """The rows of one machine and setting, and where that left the paper's."""

    rows: list[Row]
    departs: tuple[str, ...]

    @property
    def words(self) -> str:
        """Hardware, precision and sizes of what was measured."""
        first = self.rows[0]
        words = [first["hardware"], first["dtype"], f"batch {first['batch']}"]
        if "head_dim" in first:
            words.append(f"{first['heads']} heads of {first['head_dim']} channels")
        else:
            words.append(f"width {_width(first)}")
            words.append("compiled" if first.get("compiled") == "True" else "not compiled")
        return ", ".join(words)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({row["file"] for row in self.rows}))


def speeds(systems: list[str | None], tokens: int, results: Results, table: str) -> list[Value]:
    """Images a second, forward, of whole models on grids of so many tokens.

    Args:
        systems: Of `ripple bench model`, one for each row.
        tokens: Of the grid.
        results: What there is.
        table: After which the file is named that a missing one would go to.
    """
    names = {system for system in systems if system}
    rows = [row for row in results.models if row["system"] in names and row["tokens"] == tokens]
    wanted = {"batch": SPEED_BATCH, "width": MODEL_WIDTH}
    chosen = nearest(_measured(rows, "forward"), wanted, _by_system)
    found = {row["system"]: row for row in chosen.rows} if chosen else {}
    timed = [name for name in systems if name in SYSTEMS]  # together, or they do not compare
    side = math.isqrt(tokens)
    shape = f"--sides {side} --batch {SPEED_BATCH} --forward-alone"
    command = model_command(shape, timed, f"{table}-side-{side}")
    values: list[Value] = []
    for system in systems:
        if system in found and chosen:
            source = f"speed: {chosen.words}; " + ", ".join(f"`{file}`" for file in chosen.files)
            speed = (found[system]["images_per_second"],)
            better = (command,) if chosen.departs else ()
            values.append(Measured(speed, chosen.departs, source, chosen.files, commands=better))
        elif system in SYSTEMS:
            values.append(Missing((command,)))
        else:
            values.append(Missing(why="`ripple bench model` has no such system yet"))
    return values


def model_command(shape: str, systems: Iterable[str], purpose: str) -> str:
    """What times whole models of a shape, given as options."""
    only = ",".join(dict.fromkeys(name.split(", ")[-1] for name in systems))
    output = FOLDER / f"model-{purpose}.csv"
    return f"ripple bench model {shape} --only {shlex.quote(only)} --output {output.as_posix()}"


def figure_command(systems: Iterable[str]) -> str:
    """What times whole models in the setting of the paper's figures; as there, not compiled."""
    sides = ",".join(map(str, FIGURE_SIDES))
    shape = f"--sides {sides} --batch {FIGURE_BATCH} --width {FIGURE_WIDTH} --no-compiled"
    return model_command(shape, systems, f"width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}")


def operator_commands(growing: bool = False) -> tuple[str, ...]:
    """What times the operators by which growth is fitted; growing: R_max = side − 1."""
    shape = f"--batch {FIGURE_BATCH} --heads {HEADS} --head-dim {FIGURE_WIDTH // HEADS}"
    shape += " --dtype bfloat16 --device cuda"
    name = f"{FOLDER.as_posix()}/op-width-{FIGURE_WIDTH}-batch-{FIGURE_BATCH}"
    if not growing:
        sides = ",".join(map(str, OPERATOR_SIDES))
        return (f"ripple bench op --sides {sides} {shape} --output {name}.csv",)
    return tuple(
        f"ripple bench op --sides {side} --max-distance {side - 1} {shape} --only 'table triton' "
        f"--output {name}-dense-{side}.csv"
        for side in GROWING_SIDES
    )


def operator_setting(lines: Iterable[Line], results: Results) -> Setting | None:
    """The operator rows nearest to the setting of the paper's figures."""
    lines = list(lines)
    names = {system for line in lines for system in line.systems}
    rows = [row for row in results.operators if row["system"] in names and row["status"] == "ok"]
    wanted = {"batch": FIGURE_BATCH, "width": FIGURE_WIDTH}
    return nearest(rows, wanted, lambda group: sum(len(sizes(group, line)) > 1 for line in lines))


def model_setting(lines: Iterable[Line], results: Results) -> Setting | None:
    """The rows of whole models nearest to the setting of the paper's figures."""
    lines = list(lines)
    names = {system for line in lines for system in line.systems}
    rows = [row for row in results.models if row["system"] in names]
    wanted = {"batch": FIGURE_BATCH, "width": FIGURE_WIDTH}
    return nearest(rows, wanted, lambda group: sum(len(sizes(group, line)) > 1 for line in lines))


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

    groups = {key: group for key, group in groups.items() if covers(group)}
    if not groups:
        return None
    best = max(groups.values(), key=rank)
    return Setting(best, departs(best))


def points(group: list[Row], line: Line, step: str, quantity: str) -> Points:
    """(tokens, quantity) of a line, the fewest tokens first."""
    for system in line.systems:
        found = {
            row["tokens"]: row[quantity]
            for row in group
            if row["system"] == system and row["pass"] == step and row.get(quantity)
            and _distance_fits(row, line)
        }  # fmt: skip
        if found:
            return sorted(found.items())
    return []


def sizes(group: list[Row], line: Line) -> set[int]:
    """How many tokens a line was measured at."""
    return {
        row["tokens"]
        for row in group
        if row["system"] in line.systems and row["status"] == "ok" and _distance_fits(row, line)
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


def _distance_fits(row: Row, line: Line) -> bool:
    """Whether R_max is what a line wants; systems without ripples have none that matters."""
    if "max_distance" not in row or not row["system"].startswith("ripple"):
        return not line.growing
    wanted = math.isqrt(row["tokens"]) - 1 if line.growing else MAX_DISTANCE
    return row["max_distance"] == wanted


def _measured(rows: list[Row], step: str) -> list[Row]:
    return [row for row in rows if row["status"] == "ok" and row["pass"] == step]


def _by_system(group: list[Row]) -> int:
    return len({row["system"] for row in group})


def _width(row: Row) -> int:
    """Channels of a token."""
    if "head_dim" in row:
        return row["heads"] * row["head_dim"]
    return row.get("embed_dim") or MODEL_WIDTH
