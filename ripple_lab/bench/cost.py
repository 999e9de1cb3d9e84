"""What a model costs: parameters, multiply-adds, and images a second if asked for."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ripple_attention.models  # noqa: F401  (makes the names known to timm)
from ripple_attention.models import count_parameters
from ripple_attention.ops.tiled import halo_size
from ripple_lab.bench import measure


@dataclass(frozen=True)
class ModelCost:
    """One row of `ripple models`."""

    name: str
    parameters: int
    gflops: float  # billions of multiply-adds of one image, forward
    images_per_second: float | None


def _tiled_flops(
    q: Any, k: Any, v: Any, weights: Any, radii: Any, *_: Any, **__: Any
) -> int:  # shapes come in, by the counter's rules
    B, H, W, N, M = q
    E = v[-1]
    keys = halo_size(H, W, radii[-1])
    return 2 * B * N * H * W * (keys * (M + E) + 2 * M * E)


FORMULAS = {torch.ops.ripple_attention.tiled: _tiled_flops}


def multiply_adds(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Multiply-adds of one image, by PyTorch's counter and our formula for tiles."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    # The fused softmax kernels of a CPU have no formula, so count their matrix products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()(torch.zeros(1, *input_size))
    return counter.get_total_flops() // 2


def model_cost(name: str, throughput_batch: int | None = None, device: str = "cpu") -> ModelCost:
    """Measures one model by name; throughput of the forward pass where a batch size is given."""
    model: Any = timm.create_model(name)
    size = model.pretrained_cfg["input_size"]
    gflops = multiply_adds(model, size) / 1e9
    speed = None
    if throughput_batch:
        where = torch.device(device)
        model.eval().to(where)
        images = torch.randn(throughput_batch, *size, device=where)

        def step() -> None:
            with torch.inference_mode():
                model(images)

        times = measure.interleaved_seconds({name: step}, where, rounds=3, patience=20)[name]
        speed = throughput_batch / (measure.summary(times)["median_ms"] / 1e3)
    return ModelCost(name, count_parameters(model), gflops, speed)
