"""Whole models side by side: images a second, forward and in a training step."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import ripple_attention.models  # noqa: F401  (makes the names known to timm)
from ripple_attention.modules import LinearAttention
from ripple_lab import machine
from ripple_lab.bench import measure

Row = dict[str, Any]

PASSES = ("forward", "training step")
RIPPLE = "ripple_tiny_patch16_224"
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeiT, softmax SDPA": ("deit6_tiny_patch16_224", {}),
    "DeiT-LA in PyTorch operations": ("deit_la_tiny_patch16_224", {"fuse": False}),
    "DeiT-LA": ("deit_la_tiny_patch16_224", {}),
    "ripple, R_max 4": (RIPPLE, {"max_distance": 4}),
    "ripple, R_max 2": (RIPPLE, {"max_distance": 2}),
    "ripple, R_max 8": (RIPPLE, {"max_distance": 8}),
    "ripple, R_max 16": (RIPPLE, {"max_distance": 16}),
    "ripple, logarithmic": (RIPPLE, {"partition": "logarithmic", "max_distance": "side"}),
    "ripple, dense": (RIPPLE, {"partition": "dense"}),
    "ripple, all pairs in PyTorch operations": (RIPPLE, {"implementation": "naive"}),
    "ripple, tables in PyTorch operations": (RIPPLE, {"implementation": "table"}),
    "ripple, fixed": (RIPPLE, {"weights": "fixed"}),
    "ripple, truncated": (RIPPLE, {"weights": "truncated"}),
    "ripple, softmax weights": (RIPPLE, {"weights": "softmax"}),
    "ripple, 3 layers": (RIPPLE, {"ripple_layers": 3}),
    "ripple, 6 layers": (RIPPLE, {"ripple_layers": 6}),
    "ripple, 12 layers": (RIPPLE, {"ripple_layers": 12}),
    "DeiT-LA of 4 layers": ("deit_la_tiny_patch16_224", {"depth": 4}),
    "ripple of 4 layers": (RIPPLE, {"depth": 4}),
}

# Too slow to wait for unless they are named.
REFERENCES = (
    "ripple, all pairs in PyTorch operations",
    "ripple, tables in PyTorch operations",
)
USUAL = tuple(name for name in SYSTEMS if name not in REFERENCES)


@dataclass(frozen=True)
class ModelBenchmark:
    """What is measured: tiny models on square grids of `sides`² tokens, patches of 16 pixels.

    Each block is compiled: a model has at most two kinds, so this takes seconds. On a GPU, steps
    are replayed as CUDA graphs, which gives the time of their kernels; `as_called_ms` is the time
    of a step as Python calls it.
    """

    sides: tuple[int, ...] = (14, 16, 64, 128)
    tokens_at_once: int = 100_352  # 512 images of 14×14 tokens
    systems: tuple[str, ...] = USUAL
    dtype: str = "bfloat16"
    device: str = "cuda"
    compile: bool = True
    rounds: int = 5
    batch: int | None = None  # images; those of `tokens_at_once` unless given
    width: int = 192  # channels of a token
    passes: tuple[str, ...] = PASSES
    patience: float = 20.0


def run(config: ModelBenchmark, progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Times every system at every size, in turns; yields a row for each and each pass."""
    device = torch.device(config.device)
    common = {
        "hardware": machine.hardware(device),
        "torch": torch.__version__,
        "dtype": config.dtype,
        "compiled": config.compile,
        "embed_dim": config.width,
    }
    if config.compile:  # a block of each kind counts, and beyond the limit none is compiled
        torch._dynamo.config.recompile_limit = 2 * len(config.systems) + 1
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    if config.compile and device.type == "cuda":
        progress("compiling all models, side by side")
        fill_caches(config)
    for side in config.sides:
        batch = batch_size(side, config)
        for step_name in config.passes:
            steps, refused = {}, {}
            for name in config.systems:
                progress(f"{side}×{side} tokens: {step_name}, {name}")
                try:
                    step = make_step(name, side, batch, step_name, config)
                    step()
                    steps[name] = step
                except torch.OutOfMemoryError:
                    refused[name] = "does not fit"
            times = measure.interleaved_seconds(
                steps, device, config.rounds, config.patience, as_graphs=True
            )
            for name in config.systems:
                row: Row = {**common, "tokens": side**2, "batch": batch, "system": name}
                row |= {"pass": step_name, "status": refused.get(name, "ok")}
                if name in steps:
                    row |= measure.summary(times[name])
                    row["images_per_second"] = float(f"{1e3 * batch / row['median_ms']:.4g}")
                    called = [measure.seconds(steps[name], device) for _ in range(3)]
                    row["as_called_ms"] = measure.summary(called)["median_ms"]
                    row["peak_mb"] = round(measure.peak_bytes(steps[name], device) / 1e6, 1)
                yield row
            del steps
            torch.compiler.reset()


def batch_size(side: int, config: ModelBenchmark) -> int:
    """The batch size."""
    return config.batch or max(1, config.tokens_at_once // side**2)


def fill_caches(config: ModelBenchmark) -> None:
    """Compiles every model once, in as many processes as there are cores; caches keep the code."""
    jobs = product(config.systems, config.sides, [config])
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, (os.cpu_count() or 1) - 1), maxtasksperchild=1) as pool:
        pool.starmap(_run_once, jobs, chunksize=1)


def _run_once(name: str, side: int, config: ModelBenchmark) -> None:
    torch._inductor.config.compile_threads = 1  # else each process would start its own processes
    for step_name in config.passes:
        with suppress(torch.OutOfMemoryError):  # the measurement will fail too, and say so
            make_step(name, side, batch_size(side, config), step_name, config)()


def create(name: str, side: int, width: int) -> nn.Module:
    """The model of a system for a grid of side² tokens, of so many channels."""
    model, options = SYSTEMS[name]
    options = {key: side - 1 if value == "side" else value for key, value in options.items()}
    fuse = options.pop("fuse", True)
    created = timm.create_model(model, img_size=16 * side, embed_dim=width, **options)
    for module in created.modules():
        if isinstance(module, LinearAttention):
            module.fuse = fuse
    return created


def make_step(
    name: str, side: int, batch: int, step_name: str, config: ModelBenchmark
) -> measure.Step:
    """One pass of a system over random images, as something to call."""
    torch.manual_seed(0)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = create(name, side, config.width).to(device)
    images = torch.randn(batch, 3, 16 * side, 16 * side, device=device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if step_name == "forward":
        model.eval()
        if config.compile:
            _compile(model)

        def forward() -> None:
            with torch.no_grad(), autocast:
                model(images)

        return forward
    model.train()
    if config.compile:
        _compile(model)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu, capturable=on_gpu)
    labels = torch.randint(1000, (batch,), device=device)

    def training_step() -> None:
        with autocast:
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return training_step


def _compile(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)


def default_path(config: ModelBenchmark) -> Path:
    """Named after the hardware, the precision and unusual sizes."""
    width = "" if config.width == ModelBenchmark.width else f"-width-{config.width}"
    batch = f"-batch-{config.batch}" if config.batch else ""
    return measure.default_path("model", config.device, f"{config.dtype}{width}{batch}")
