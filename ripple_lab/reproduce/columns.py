"""The columns of tables: for each, where our numbers come from."""

from collections.abc import Callable
from functools import cache

import timm
import torch

import ripple_attention.models  # noqa: F401  (makes the names known to timm)
from ripple_attention.models import count_parameters
from ripple_lab.bench.detection import detector_cost
from ripple_lab.reproduce.found import Results
from ripple_lab.reproduce.layout import Column, PaperTable
from ripple_lab.reproduce.runs import best_runs, shared_epochs
from ripple_lab.reproduce.speeds import (
    FIT_FROM,
    Setting,
    exponent,
    nearest,
    operator_commands,
    operator_setting,
    points,
    speeds,
)
from ripple_lab.reproduce.values import Measured, Missing, Value

Ours = Callable[[PaperTable, Results], list[Value]]


def trained(quantity: str, unit: float = 1) -> Ours:
    """A result of training, times a unit."""

    def ours(table: PaperTable, results: Results) -> list[Value]:
        recipes = [str(row.recipe) for row in table.rows]
        named = frozenset(row.recipe for row in table.rows if row.recipe)
        epochs = shared_epochs(sorted(named), quantity, results)
        return [best_runs(name, quantity, results, named, unit, epochs) for name in recipes]

    return ours


def parameters(table: PaperTable, _: Results) -> list[Value]:
    """Millions of learned numbers, counted."""
    return [
        Measured((_count(row.model, row.positions) / 1e6,)) if row.model else Missing(why="–")
        for row in table.rows
    ]


def multiply_adds(table: PaperTable, _: Results) -> list[Value]:
    """Billions of multiply-adds of a detector, counted."""
    return [Measured((_detector(str(row.model))[1],)) for row in table.rows]


def seconds(table: PaperTable, results: Results) -> list[Value]:
    """Seconds that a detector takes for one image, all on one machine."""
    timed = [
        row
        for row in results.detectors
        if (row["part"], row["pass"], row["status"]) == ("detector", "forward", "ok")
        and row["batch"] == 1
    ]
    chosen = nearest(timed, {}, len)
    found = {row["system"]: row for row in chosen.rows} if chosen else {}
    values: list[Value] = []
    for model in (str(row.model) for row in table.rows):
        if model in found:
            row = found[model]
            source = f"time: {row['hardware']}, {row['dtype']}; `{row['file']}`"
            values.append(Measured((row["median_ms"] / 1e3,), (), source, (row["file"],)))
        else:
            values.append(Missing(("ripple bench detection --grids none",)))
    return values


def images_per_second(table: PaperTable, results: Results) -> list[Value]:
    """Speed of whole models, forward."""
    return speeds([row.system for row in table.rows], table.tokens, results, table.name)


def growth(step: str, quantity: str) -> Ours:
    """The power of the number of tokens by which time or memory grows."""

    def ours(table: PaperTable, results: Results) -> list[Value]:
        lines = [row.line for row in table.rows if row.line]
        assert len(lines) == len(table.rows)
        setting = operator_setting(lines, results)
        values: list[Value] = []
        for line in lines:
            found = points(setting.rows, line, step, quantity) if setting else []
            power = exponent(found)
            if power is None or setting is None:
                values.append(Missing(operator_commands(line.growing)))
            else:
                values.append(Measured((power,), (), _fit(setting, found), setting.files))
        return values

    return ours


def _fit(setting: Setting, found: list[tuple[int, float]]) -> str:
    fitted = [f"{tokens:,}" for tokens, _ in found if tokens >= FIT_FROM]
    files = ", ".join(f"`{file}`" for file in setting.files)
    return f"fitted at {', '.join(fitted)} tokens; {setting.words}; {files}"


@cache
def _count(model: str, positions: bool) -> int:
    if model.startswith("smca"):
        return _detector(model)[0]
    with torch.device("meta"):  # counts need no numbers
        return count_parameters(
            timm.create_model(model, pos_embed="learn" if positions else "none")
        )


@cache
def _detector(model: str) -> tuple[int, float]:
    cost = detector_cost(model)
    return cost.parameters, cost.gflops


COLUMNS: dict[str, Column] = {
    "parameters": Column("M parameters", (2, 2), parameters),
    "detector": Column("M parameters", (1, 1), parameters),
    "gflops": Column("G multiply-adds", (0, 0), multiply_adds),
    "seconds": Column("seconds an image", (3, 4), seconds),
    "top1": Column("top-1 %", (2, 1), trained("top1"), trained=True),
    "top5": Column("top-5 %", (2, 1), trained("top5"), trained=True),
    "speed": Column("images/s", (0, 0), images_per_second),
    "ap": Column("AP", (1, 1), trained("ap", 100), trained=True),
    "ap_small": Column("AP, small", (1, 1), trained("ap_small", 100), trained=True),
    "ap_medium": Column("AP, medium", (1, 1), trained("ap_medium", 100), trained=True),
    "ap_large": Column("AP, large", (1, 1), trained("ap_large", 100), trained=True),
    "forward": Column("power of T: time, forward", (1, 2), growth("forward", "median_ms")),
    "both": Column(
        "power of T: time, both passes", (1, 2), growth("forward+backward", "median_ms")
    ),
    "memory": Column(
        "power of T: memory, both passes", (1, 2), growth("forward+backward", "peak_mb")
    ),
}
