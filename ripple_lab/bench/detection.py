"""Detection side by side: the encoder alone on growing grids, and whole detectors on one image."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ripple_attention.models import count_parameters
from ripple_lab import machine
from ripple_lab.bench import measure
from ripple_lab.bench.cost import ModelCost, multiply_adds
from ripple_lab.detection.encoder import ATTENTIONS, Encoder
from ripple_lab.detection.model import FAMILIES, create_detector
from ripple_lab.detection.positions import padding_mask, sine_positions

Row = dict[str, Any]
MakeStep = Callable[[str], measure.Step]

PASSES = ("forward", "training step")


@dataclass(frozen=True)
class DetectionBenchmark:
    """What is measured: 6-layer encoders on `grids` (rows, columns) of cells, and detectors.

    `batch` is images at a time, for both. With `padded`, a quarter of each grid's columns is
    padding. Each layer of an encoder is compiled. On a GPU encoders are replayed as CUDA graphs,
    which gives the time of their kernels; detectors run as a user calls them, so their time
    includes Python's launches. Without grids or without `image_size` that part is left out.
    """

    grids: tuple[tuple[int, int], ...] = ((25, 34), (50, 68), (100, 136), (200, 272))
    image_size: tuple[int, int] | None = (800, 1066)
    backbone: str = "resnet50"
    batch: int = 1
    padded: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"
    compile: bool = False
    rounds: int = 5
    patience: float = 20.0


def run(
    config: DetectionBenchmark, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Times the three systems in turns; yields a row for each size, pass and system."""
    device = torch.device(config.device)
    common: Row = {
        "hardware": machine.hardware(device),
        "torch": torch.__version__,
        "dtype": config.dtype,
        "batch": config.batch,
    }
    for H, W in config.grids:
        for step_name in PASSES:
            row = common | {"part": "encoder", "compiled": config.compile, "padded": config.padded}
            row |= {"height": H, "width": W, "tokens": H * W, "pass": step_name}
            row["timed_as"] = "graph" if device.type == "cuda" else "calls"
            progress(f"encoder, {H}×{W} cells: {step_name}")

            def make(name: str, grid: tuple[int, int] = (H, W), kind: str = step_name) -> Any:
                return encoder_step(name, grid, kind, config)

            yield from _time(tuple(ATTENTIONS), make, row, config)
            torch.compiler.reset()
    if config.image_size is not None:
        H, W = config.image_size
        row = common | {"part": "detector", "compiled": False, "padded": False}
        row |= {"height": H, "width": W, "tokens": -(-H // 32) * -(-W // 32), "pass": "forward"}
        row["timed_as"] = "calls"
        progress(f"detectors, {H}×{W} pixels")
        names = tuple(f"{family}_{config.backbone}" for family in FAMILIES)
        yield from _time(names, lambda name: detector_step(name, config), row, config)


def _time(
    names: tuple[str, ...], make: MakeStep, row: Row, config: DetectionBenchmark
) -> Iterator[Row]:
    """Rows of systems that are timed in turns; those that do not fit say so."""
    device = torch.device(config.device)
    steps = {}
    for name in names:
        try:
            step = make(name)
            step()
            steps[name] = step
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
    as_graphs = row["timed_as"] == "graph"
    times = measure.interleaved_seconds(steps, device, config.rounds, config.patience, as_graphs)
    for name in names:
        found = {**row, "system": name, "status": "ok" if name in steps else "does not fit"}
        if name in steps:
            found |= measure.summary(times[name])
            found["images_per_second"] = round(1e3 * config.batch / found["median_ms"], 2)
            found["peak_mb"] = round(measure.peak_bytes(steps[name], device) / 1e6, 1)
        yield found


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU or a CPU ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def encoder_step(
    attention: str, grid_size: tuple[int, int], step_name: str, config: DetectionBenchmark
) -> measure.Step:
    """One pass of an encoder over random cells, as something to call."""
    torch.manual_seed(0)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    encoder = Encoder(attention).to(device)
    (H, W), dim = grid_size, 256
    x = torch.randn(config.batch, H, W, dim, device=device)
    width = max(1, W - W // 4) if config.padded else W
    cells = torch.tensor([[H, width]], device=device).expand(config.batch, 2)
    positions = sine_positions(cells, grid_size, dim)
    mask = padding_mask(cells, grid_size) if config.padded else None
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    encoder.train(step_name != "forward")
    if config.compile:
        for layer in encoder.layers:
            layer.compile(dynamic=False)
    if step_name == "forward":

        def forward() -> None:
            with torch.no_grad(), autocast:
                encoder(x, positions, mask)

        return forward
    capturable = device.type == "cuda"
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=capturable, capturable=capturable)

    def training_step() -> None:
        with autocast:
            encoded = encoder(x, positions, mask)
        encoded.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return training_step


def detector_step(name: str, config: DetectionBenchmark) -> measure.Step:
    """A detector's forward pass over random images, as something to call."""
    assert config.image_size is not None
    torch.manual_seed(0)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = create_detector(name, pretrained_backbone=False).to(device).eval()
    images = list(torch.randn(config.batch, 3, *config.image_size, device=device))
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def forward() -> None:
        with torch.no_grad(), autocast:
            model(images)

    return forward


def detector_cost(name: str, image_size: tuple[int, int] = (800, 1066)) -> ModelCost:
    """Parameters, those that are fixed among them, and multiply-adds of one image, forward."""
    with torch.device("meta"):  # counting needs no values
        model: nn.Module = create_detector(name, pretrained_backbone=False)
        gflops = multiply_adds(model, (3, *image_size)) / 1e9
    return ModelCost(name, count_parameters(model), gflops, None)


def default_path(config: DetectionBenchmark) -> Path:
    """Named after the hardware and the precision."""
    return measure.default_path("detection", config.device, config.dtype)
