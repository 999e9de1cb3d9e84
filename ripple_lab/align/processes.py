"""Several processes that align one model, each on its own batches."""

from typing import Any

import torch
from torch import Tensor


def grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_main() -> bool:
    return not grouped() or torch.distributed.get_rank() == 0


def share_parameters(blocks: dict[str, Any]) -> None:
    """All processes begin with the first one's."""
    if grouped():
        for block in blocks.values():
            for x in (*block.parameters(), *block.buffers()):
                torch.distributed.broadcast(x.data, 0)


def average_gradients(trained: list[Tensor]) -> None:
    if grouped():
        for p in trained:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(gradient)
            p.grad = gradient / torch.distributed.get_world_size()
