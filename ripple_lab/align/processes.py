"""Several processes that align one model, each on its own batches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def any_process(said: bool) -> bool:
    """Whether one of the processes says so: all stop at the same step, or none."""
    if not grouped():
        return said
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(float(said), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """The group that torchrun started, if it did; gives the device of this process."""
    if "LOCAL_RANK" not in os.environ:
        yield torch.device(device)
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    torch.distributed.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield place
    finally:
        torch.distributed.destroy_process_group()


def one_share(paths: list[Path]) -> list[Path]:
    """What this process takes of what all have; as much as each other one."""
    if not grouped():
        return paths
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if len(paths) < count:
        raise ValueError(f"each of {count} processes needs a photo; got {len(paths)}")
    return paths[rank : len(paths) // count * count : count]
