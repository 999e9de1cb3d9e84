"""Which blocks of a model to convert: the error of each, before and after a short alignment."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import nn

from ripple_attention.convert import Report, convert
from ripple_lab.align.align import align
from ripple_lab.align.lessons import Batch, errors

EASY, HARD = 0.1, 0.3


@dataclass(frozen=True)
class Forecast:
    """What to expect of a block.

    Attributes:
        index, name: Of the block.
        before, after: Its relative squared error as converted, and once its new parameters learned.
    """

    index: int
    name: str
    before: float
    after: float

    @property
    def advice(self) -> str:
        if self.after <= EASY:
            return "convert"
        return "convert, tune its projections" if self.after <= HARD else "keep softmax"


def plan(
    model: nn.Module,
    batches: Iterable[Batch],
    held_out: Iterable[Batch],
    *,
    steps: int = 30,
    keep_lessons: bool = False,
    console: Console | None = None,
    **conversion: Any,
) -> tuple[Report, list[Forecast]]:
    """Converts a copy of a model and aligns it for a few steps; the model stays as it is.

    Args:
        model: With softmax.
        batches: To learn from.
        held_out: To measure on.
        steps: Of the alignment; 0 measures the conversion alone.
        keep_lessons: As in `align`.
        console: Where progress shows.
        conversion: Arguments of `convert`.
    """
    student = copy.deepcopy(model)
    report = convert(student, **conversion)
    model.eval()
    before = errors(student.eval(), model, held_out)
    if steps:
        align(student, model, batches, steps=steps, keep_lessons=keep_lessons, console=console)
    after = errors(student, model, held_out) if steps else before
    forecasts = [
        Forecast(block.index, block.name, before[block.name], after[block.name])
        for block in report.blocks
        if block.converted and block.index is not None
    ]
    return report, forecasts
