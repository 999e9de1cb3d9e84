"""Training steps as CUDA graphs: the kernels of a step are launched together, not one by one.

Python takes longer to launch the kernels of a small model than a GPU takes to run them. A graph is
recorded once, with all kernels of the loss and its gradients, and replayed for every batch.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ripple_lab.train.recipe import Hardware

WARM_UP = 3  # passes before the recorded one: they compile kernels and allocate workspaces

Pass = Callable[[], Tensor]


class NotRecordableError(Exception):
    """A step that cannot be recorded as a CUDA graph, and why."""


def why_eager(
    hardware: Hardware, device: torch.device, processes: int, fixed_shapes: bool
) -> str | None:
    """Why steps cannot be replayed as CUDA graphs, the first reason; None if they can.

    Args:
        hardware: Of the recipe.
        device: Where the model is.
        processes: How many train together.
        fixed_shapes: Whether all batches have the same shapes, but for a few.
    """
    reasons = {
        "that needs an NVIDIA GPU": device.type != "cuda",
        "hardware.graphs is off": not hardware.graphs,
        "the images of a batch have sizes of their own": not fixed_shapes,
        "several processes exchange their gradients": processes > 1,
        "with 16-mixed, the scale of the loss changes": hardware.precision == "16-mixed",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class StepGraph:
    """The loss of a batch and its gradients, recorded once and replayed for every batch.

    Random numbers come from the default generator, as it is seeded when a step is replayed: they
    are those of a step that is not replayed. Weights are read where they are, so an optimizer may
    change them in place between replays.

    Args:
        model: Gets the gradients; those that it has are lost.
        loss: The tensors of a batch → its loss. The model's part in it is what is recorded: it must
            not wait for the GPU, nor depend on anything that Python computes anew for each batch.
        batch: The first batch.

    Raises:
        NotRecordableError: The loss waits for the GPU.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Tensor]):
        self._batch = [tensor.clone() for tensor in batch]

        def loss_and_gradients() -> Tensor:
            model.zero_grad()  # no gradients: new ones are written, not added to the old
            value = loss(*self._batch)
            with torch.autocast(value.device.type, enabled=False):  # on around the loss alone
                value.backward()
            return value.detach()

        self._replay, self._loss = record(loss_and_gradients, model)
        self._gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Whether a batch has the shapes and types of the first."""
        kinds, own = ([(x.shape, x.dtype) for x in tensors] for tensors in (batch, self._batch))
        return kinds == own

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch that fits; the model gets its gradients."""
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        for parameter, gradient in self._gradients:  # another step may have made its own
            parameter.grad = gradient
        self._replay()
        return self._loss.clone()


def record(compute: Pass, model: nn.Module) -> tuple[Callable[[], None], Tensor]:
    """Records what a pass launches; random state and buffers stay as they were.

    Returns:
        What replays it, and where its result is after that.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.random.fork_rng([torch.cuda.current_device()]):
        try:
            with torch.cuda.stream(stream), _same_buffers(model):
                for _ in range(WARM_UP - 1):
                    compute()
                with _no_waiting():
                    compute()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Loaders pin memory in threads of their own meanwhile: only this one must not.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = compute()
        except RuntimeError as error:  # after which the generator is of no more use
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"a step could not be recorded as a CUDA graph ({reason}): "
                "train without, --hardware.no-graphs"
            ) from error
    return graph.replay, result


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Puts running means and the like back to what they were."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Refuses what waits for the GPU, which no graph can hold."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise NotRecordableError(
            f"a step waits for the GPU, in {where.filename}, line {where.lineno}"
        ) from None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
