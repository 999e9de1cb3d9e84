"""What a teacher's blocks are given, what they make of it, and how far others are off."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ripple_attention.checks import shorten
from ripple_attention.convert import Grid, converted

Batch = Tensor | dict[str, Tensor]


@dataclass
class Lesson:
    """One call of a teacher's attention, and the grid of its image where patches told it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    grid_size: tuple[int, int] | None


def run(model: nn.Module, batch: Batch) -> Any:
    """A model on images (B, 3, H, W), or on what it takes by name."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def check_teacher(model: nn.Module, teacher: nn.Module) -> None:
    """Refuses a teacher that is not the model as it was before its conversion."""
    blocks = [name for name, _ in converted(model)]
    if not blocks:
        raise ValueError(
            f"the model must hold ripples; got {type(model).__name__} without: convert(model) first"
        )
    for name, _ in converted(teacher):
        raise ValueError(
            f"the teacher attends by softmax; got one with ripples in {name}: take a copy from "
            "before the conversion"
        )
    theirs, ours = dict(teacher.named_parameters()), dict(model.named_parameters())
    alike = {name: x.shape for name, x in ours.items() if ".ripple." not in name}
    if alike != {name: x.shape for name, x in theirs.items()}:
        raise ValueError(
            "the teacher has the parameters that the model had before its conversion; got others, "
            f"{len(theirs)} beside {len(alike)}: take a copy from before the conversion"
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    tensors = [*batch.values()] if isinstance(batch, dict) else [batch]
    if not all(isinstance(x, Tensor) for x in tensors):
        raise ValueError(
            "a batch is a tensor of images (B, 3, H, W) or a dictionary of tensors by name; got "
            f"{shorten(batch)}: leave labels out"
        )
    if isinstance(batch, dict):
        return {name: x.to(device, non_blocking=True) for name, x in batch.items()}
    return batch.to(device, non_blocking=True)


def first_tensor(output: Any) -> Tensor:
    """An attention's output without the probabilities that some libraries add."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def listening(model: nn.Module, teacher: nn.Module) -> Iterator[dict[str, Lesson]]:
    """Holds what each converted block would be given, after each pass of the teacher."""
    lessons: dict[str, Lesson] = {}

    def listen(name: str, grid: Grid) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            lessons[name] = Lesson(args, kwargs, first_tensor(output), grid.size)

        return hook

    with ExitStack() as hooks:
        for name, own in converted(model):
            attention, hook = teacher.get_submodule(name), listen(name, own.ripple_grid)
            hooks.enter_context(attention.register_forward_hook(hook, with_kwargs=True))
        for name, module in model.named_modules():  # the model's grids follow the teacher's images
            for hook in module._forward_hooks.values():
                if isinstance(hook, Grid):
                    patches = teacher.get_submodule(name)
                    hooks.enter_context(patches.register_forward_hook(hook))
        yield lessons


def relative_error(output: Tensor, reference: Tensor) -> Tensor:
    """‖output − reference‖² ÷ ‖reference‖², over all of a batch."""
    reference = reference.to(torch.promote_types(reference.dtype, torch.float32))
    return (output.to(reference.dtype) - reference).square().sum() / reference.square().sum().clamp(
        min=1e-12
    )


def attend(attention: Any, lesson: Lesson) -> Tensor:
    """What an attention makes of a lesson."""
    if lesson.grid_size is not None:
        attention.ripple_grid.size = lesson.grid_size
    return first_tensor(attention(*lesson.args, **lesson.kwargs))


def lesson_error(attention: Any, lesson: Lesson) -> Tensor:
    return relative_error(attend(attention, lesson), lesson.output)


@torch.no_grad()
def errors(model: nn.Module, teacher: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The mean relative squared error of each converted block, on what the teacher's is given."""
    check_teacher(model, teacher)
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    count = 0
    with listening(model, teacher) as lessons:
        for batch in batches:
            run(teacher, to_device(batch, device))
            for name, attention in converted(model):
                error = float(lesson_error(attention, lessons[name]))
                sums[name] = sums.get(name, 0.0) + error
            count += 1
    if not count:
        raise ValueError("errors are measured on images, and there are none")
    return {name: total / count for name, total in sums.items()}
