"""One step of an alignment: the errors of a batch, their gradients, and the optimizer's step."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ripple_attention.convert import converted
from ripple_lab.align.calibrate import calibrate
from ripple_lab.align.lessons import (
    Batch,
    Lesson,
    lesson_error,
    listening,
    relative_error,
    run,
    to_device,
)
from ripple_lab.align.processes import average_gradients

Features = Callable[[nn.Module, Batch], Any]

CALIBRATED = 4  # batches that a calibration sees


def features_of(model: nn.Module, batch: Batch) -> Any:
    """What a model makes of images before it classifies them.

    The maps of all blocks or stages where timm gives them; the last hidden state of transformers;
    else what the model returns.
    """
    intermediates: Any = getattr(model, "forward_intermediates", None)
    if intermediates is not None and isinstance(batch, Tensor):
        return intermediates(batch, intermediates_only=True)
    output = run(model, batch)
    return getattr(output, "last_hidden_state", output)


class Learning:
    """Steps towards a teacher.

    Args:
        model, teacher, features, keep_lessons: As in `align`.
    """

    def __init__(
        self, model: nn.Module, teacher: nn.Module, features: Features, keep_lessons: bool
    ):
        self.model, self.teacher, self.features = model, teacher, features
        self.blocks = dict(converted(model))
        self.device = next(model.parameters()).device
        self.keep_lessons = keep_lessons
        self.kept: dict[tuple[str, int], Any] = {}

    def __call__(
        self,
        index: int,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        trained: list[Tensor],
        end_to_end: bool,
    ) -> dict[str, float]:
        """Learns from a batch; its number tells it from others that are kept."""
        optimizer.zero_grad()
        errors = self.end_to_end(index, batch) if end_to_end else self.by_block(index, batch)
        average_gradients(trained)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        for name, value in (*errors.items(), ("gradient", norm)):
            if not math.isfinite(value):
                raise RuntimeError(
                    f"the alignment has diverged: {name} is {value} for batch {index}, and this "
                    "step is not made. See that the weights and photos are sound, or try lower "
                    "rates"
                )
        optimizer.step()
        return errors

    def calibrate(self, batches: Iterable[Batch]) -> None:
        few = itertools.islice(enumerate(batches), CALIBRATED)
        lessons = [self.lessons(index, batch) for index, batch in few]
        for name, lesson in ((n, one[n]) for one in lessons for n in self.blocks):
            if not lesson.output.isfinite().all():
                raise RuntimeError(
                    f"the teacher's outputs must be finite; got infinities or NaN from {name}: see "
                    "that its weights and the photos are sound"
                )
        for name, attention in self.blocks.items():
            with self.precision():
                calibrate(attention, [lesson[name] for lesson in lessons])

    def of_teacher(self, what: str, index: int, make: Callable[[], Any]) -> Any:
        """What the teacher makes of a batch; made once where it is to be kept."""
        if (what, index) in self.kept:
            return self.kept[what, index]
        with torch.no_grad(), self.precision():
            made = make()
        if self.keep_lessons:
            self.kept[what, index] = made
        return made

    def lessons(self, index: int, batch: Batch) -> dict[str, Lesson]:
        """What each block of the teacher takes and gives for a batch."""

        def listen() -> dict[str, Lesson]:
            with listening(self.model, self.teacher) as lessons:
                run(self.teacher, to_device(batch, self.device))
            return lessons

        return self.of_teacher("lessons", index, listen)

    def by_block(self, index: int, batch: Batch) -> dict[str, float]:
        lessons = self.lessons(index, batch)
        return {
            name: self.backward(partial(lesson_error, attention, lessons[name]))
            for name, attention in self.blocks.items()
        }

    def end_to_end(self, index: int, batch: Batch) -> dict[str, float]:
        batch = to_device(batch, self.device)
        wanted = self.of_teacher(
            "features", index, lambda: list(tensors_of(self.features(self.teacher, batch)))
        )
        if not wanted:
            raise ValueError("features must have a tensor of floating-point numbers; got none")

        def error() -> Tensor:
            found = tensors_of(self.features(self.model, batch))
            pairs = zip(found, wanted, strict=True)
            return torch.stack([relative_error(*pair) for pair in pairs]).mean()

        return {"features": self.backward(error)}

    def backward(self, error: Callable[[], Tensor]) -> float:
        with self.precision():
            loss = error()
        loss.backward()
        return float(loss.detach())

    def precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors of nested lists and dictionaries."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(child)
