"""Whole attention layers with their projections, side by side: forward, and forward and backward.

Projections take much of a layer's time and are the same in every system, so a layer gains less than
its operator does. This is the gain that a model gets.
"""

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ripple_attention.modules import GridAttention, LinearAttention, RippleAttention
from ripple_attention.spatial_weights import SpatialWeights, WeightKind
from ripple_lab import machine
from ripple_lab.bench import measure
from ripple_lab.bench.attentions import FLOOR, MAPS, WEIGHTS, Shape, System, systems
from ripple_lab.bench.op import AGREEMENT

Row = dict[str, Any]

PASSES = ("forward", "forward+backward")
CHECKED_IMAGES = 4  # of a batch, at most
GRAPH_STEPS, LONG_STEP = 5, 0.02  # steps in a CUDA graph; only one if it takes longer (seconds)

SHAPES = {
    "cpu": "196,1,192/6; 1024,1,192/6",
    "cuda": "196,64,192/6; 196,64,384/6; 4096,4,384/6; 4096,4,768/12; 16384,2,768/12; "
    "4096,4,1024/8; 4096,4,720/10; 4096,4,720/9; 4096,4,768/8",
}
"""The usual shapes by device. The last of a GPU's have heads of 72, 80 and 96 channels."""


@dataclass(frozen=True)
class LayerBenchmark:
    """What is measured: ripple layers with the first reach, map and kind, and each other in turn.

    In half precision layers run under autocast. On a GPU several steps are replayed as one CUDA
    graph, which gives the time of their kernels.
    """

    shapes: tuple[Shape, ...]
    reaches: tuple[int, ...] = (4, 8)
    maps: tuple[str, ...] = MAPS
    weights: tuple[WeightKind, ...] = WEIGHTS
    only: tuple[str, ...] = ()  # names of systems; all unless given
    dtype: str = "float32"
    device: str = "cpu"
    rounds: int = 2
    budget: float = math.inf  # seconds after which nothing more is started
    patience: float = 5.0

    @property
    def systems(self) -> dict[str, System]:
        return systems(self.reaches, self.maps, self.weights, self.device)

    @property
    def autocast(self) -> AbstractContextManager:
        dtype, kind = getattr(torch, self.dtype), torch.device(self.device).type
        return torch.autocast(kind, dtype, enabled=dtype != torch.float32)


def make_layer(system: System, shape: Shape, config: LayerBenchmark) -> GridAttention:
    """A layer whose weights make a check meaningful: at the start all rings weigh the same."""
    torch.manual_seed(0)
    layer = system.make(shape)
    with torch.no_grad():
        layer.qkv.weight.mul_(2)
        for linear in (layer.qkv, layer.proj):
            linear.bias.zero_()  # else they would dominate the output
        for module in layer.modules():
            if isinstance(module, SpatialWeights) and module.kind != "fixed":
                module.embedding.normal_(std=0.5)
    return layer.to(config.device)


def make_inputs(shape: Shape, config: LayerBenchmark, images: int) -> tuple[Tensor, Tensor]:
    """x, in float32 as norms return it under autocast, and the output's gradient."""
    generator = torch.Generator(config.device).manual_seed(0)
    size = (2, images, shape.height, shape.width, shape.dim)
    x, upstream = torch.randn(size, generator=generator, device=config.device).unbind(0)
    return x.requires_grad_(), upstream.to(getattr(torch, config.dtype))


def make_step(
    layer: GridAttention, inputs: tuple[Tensor, Tensor], step_name: str, config: LayerBenchmark
) -> measure.Step:
    """One pass of a layer, as something to call."""
    x, upstream = inputs
    if step_name == "forward":

        def forward() -> None:
            layer.eval()
            with torch.no_grad(), config.autocast:
                layer(x)

        return forward
    wanted = x, *layer.parameters()

    def forward_and_backward() -> None:
        layer.train()
        with config.autocast:
            out = layer(x)
        torch.autograd.grad(out, wanted, upstream)

    return forward_and_backward


def run(config: LayerBenchmark, progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Checks, then times, every system at every shape; yields a row for each system and pass.

    A system that is wrong, fails or does not fit is not timed, and its status says so.
    """
    device, deadline = torch.device(config.device), time.monotonic() + config.budget
    known = config.systems
    wanted = [name for name in known if not config.only or name in (*config.only, FLOOR)]
    common = {"hardware": machine.hardware(device), "torch": torch.__version__}
    common["dtype"] = config.dtype
    runnable = [name for name in wanted if not known[name].refusal]
    if device.type == "cuda":
        progress("compiling all kernels, side by side")
        fill_caches(runnable, config)
    for shape in config.shapes:
        row = common | {"tokens": shape.tokens, "height": shape.height, "width": shape.width}
        row |= {"batch": shape.batch, "dim": shape.dim, "heads": shape.heads}
        row |= {"head_dim": shape.head_dim}
        layers: dict[str, GridAttention] = {}
        checked: dict[str, Row] = {}
        for name in runnable:
            if time.monotonic() > deadline:
                checked[name] = too_late(config)
                continue
            progress(f"{shape}: agreement, {name}")
            try:
                layer = make_layer(known[name], shape, config)
                checked[name] = check(known[name], layer, shape, config)
                layers[name] = layer
            except Exception as error:  # the others can still be timed
                checked[name] = {"status": what_failed(error)}
            free(device)
        for step_name in PASSES:
            progress(f"{shape}: time, {step_name}")
            timed = time_pass(layers, shape, step_name, config, deadline)
            for name in wanted:
                found = {"status": known[name].refusal, "median_ms": None, "peak_mb": None}
                found |= checked.get(name, {}) | timed.get(name, {})
                yield {**row, "system": name, "pass": step_name, **found, **known[name].facts}
        layers.clear()
        torch.compiler.reset()  # after eight shapes FlexAttention would no longer be compiled
        free(device)


def time_pass(
    layers: dict[str, GridAttention],
    shape: Shape,
    step_name: str,
    config: LayerBenchmark,
    deadline: float,
) -> dict[str, Row]:
    """Times and peak memory of layers that take turns, or why there are none."""
    device, inputs = torch.device(config.device), make_inputs(shape, config, shape.batch)
    found: dict[str, Row] = {}
    steps: dict[str, measure.Step] = {}
    counts: dict[str, int] = {}
    for name, layer in layers.items():
        if time.monotonic() > deadline:
            found[name] = too_late(config)
            continue
        step = make_step(layer, inputs, step_name, config)
        try:
            step()
            peak = measure.peak_bytes(step, device) / 1e6
            steps[name], counts[name], timed_as = as_graph(step, device)
        except Exception as error:
            found[name] = {"status": what_failed(error)}
            continue
        found[name] = {"status": "ok", "timed_as": timed_as, "peak_mb": round(peak, 4)}
    times = measure.interleaved_seconds(steps, device, config.rounds, config.patience)
    for name, samples in times.items():
        found[name] |= measure.summary([seconds / counts[name] for seconds in samples])
    return found


def as_graph(step: measure.Step, device: torch.device) -> tuple[measure.Step, int, str]:
    """Steps as one CUDA graph, how many they are, and how it is timed; else the step as it is."""
    if device.type != "cuda":
        return step, 1, "calls"
    count = GRAPH_STEPS if measure.seconds(step, device) < LONG_STEP else 1
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                step()
    except RuntimeError:  # it waits for the device, or memory is not there twice
        torch.cuda.synchronize()
        return step, 1, "calls"
    return graph.replay, count, f"graph of {count}"


class DisagreementError(RuntimeError):
    """A layer does not compute what its definition says."""


def check(system: System, layer: GridAttention, shape: Shape, config: LayerBenchmark) -> Row:
    """Errors of the output and of the worst gradient, against the definition in float32.

    An error may be twice that of the definition in the timed precision, or `AGREEMENT`. A layer
    beyond both is refused.
    """
    if system.define is None:
        return {}
    images = min(CHECKED_IMAGES, shape.batch)
    inputs = make_inputs(shape, config, images)
    definition = system.define(shape).to(config.device)
    definition.load_state_dict(layer.state_dict())
    if isinstance(definition, RippleAttention):
        definition.implementation = definition_for(shape, images, config)
    found = results(layer, inputs, config.autocast)
    plain = results(definition, inputs, config.autocast)
    exact = results(definition, inputs, nullcontext())
    errors, least = {}, AGREEMENT[getattr(torch, config.dtype)]
    for name, expected in exact.items():
        errors[name] = relative_error(found[name], expected)
        allowed = max(least, 2 * relative_error(plain[name], expected))
        if not errors[name] <= allowed:
            raise DisagreementError(
                f"its {name} is {errors[name]:.1e} off its definition "
                f"(at most {allowed:.1e} is rounding)"
            )
    row = {"relative_error": max(errors.pop("output"), errors.pop("output without gradients"))}
    row["gradient_error"] = max(errors.values())
    return {
        **{name: float(f"{error:.2e}") for name, error in row.items()},
        "operators": operators(layer, inputs[0], config),
    }


def definition_for(shape: Shape, images: int, config: LayerBenchmark) -> str:
    """All pairs, or tiles in PyTorch operations if these do not fit."""
    pairs = 6 * 4 * images * shape.heads * shape.tokens**2  # bytes, as `bench.op` expects them
    return "naive" if pairs < machine.available_bytes(torch.device(config.device)) / 2 else "tiled"


def results(
    layer: GridAttention, inputs: tuple[Tensor, Tensor], autocast: AbstractContextManager
) -> dict[str, Tensor]:
    """The output and all gradients by name."""
    x, upstream = inputs
    parameters = dict(layer.eval().named_parameters())
    with autocast:
        out = layer(x)
    with autocast, torch.no_grad():
        alone = layer(x)
    grads = torch.autograd.grad(out, (x, *parameters.values()), upstream.to(out.dtype))
    names = (f"gradient of {name}" for name in ("x", *parameters))
    named = dict(zip(names, grads, strict=True))
    return {"output": out.detach(), "output without gradients": alone, **named}


def relative_error(got: Tensor, expected: Tensor) -> float:
    size = float(expected.norm())
    return float((got.float() - expected).norm()) / (size or 1.0)


class _Called(TorchDispatchMode):
    """Collects the names of our own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ripple_attention":
            self.names[func._opname] = None
        return func(*args, **(kwargs or {}))


def operators(layer: GridAttention, x: Tensor, config: LayerBenchmark) -> str:
    """Which of our operators a layer calls, so that no slow fallback goes unnoticed."""
    if not isinstance(layer, LinearAttention):
        return ""
    with torch.no_grad(), config.autocast, _Called() as called:
        layer(x)
    return ", ".join(called.names) or "PyTorch operations"


def free(device: torch.device) -> None:
    """Frees the memory that PyTorch caches, so that it counts as free."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def too_late(config: LayerBenchmark) -> Row:
    return {"status": f"skipped: the budget of {config.budget:g} s was used up"}


def what_failed(error: Exception) -> str:
    """A status in one line."""
    if isinstance(error, DisagreementError):
        return f"wrong: {error}"
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "does not fit"
    said = next(iter(str(error).strip().splitlines()), "")
    return f"failed: {type(error).__name__}: {said}"


def fill_caches(names: list[str], config: LayerBenchmark) -> None:
    """Compiles what is timed, in as many processes as there are cores; caches keep the code."""
    jobs = [(name, shape, config) for shape in config.shapes for name in names]
    workers = min(len(jobs), max(1, (os.cpu_count() or 1) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        started = [pool.submit(_run_once, *job) for job in jobs]
        # A worker that fails or dies only costs time: the measurement will fail too, and say so.
        wait(started, timeout=None if config.budget == math.inf else config.budget / 2)
        pool.shutdown(cancel_futures=True)


def _run_once(name: str, shape: Shape, config: LayerBenchmark) -> None:
    torch._inductor.config.compile_threads = 1  # else each process would start its own processes
    layer = make_layer(config.systems[name], shape, config)
    for images in sorted({min(CHECKED_IMAGES, shape.batch), shape.batch}):
        for step_name in PASSES:
            make_step(layer, make_inputs(shape, config, images), step_name, config)()
    torch.compiler.reset()
    free(torch.device(config.device))


def table_cells(rows: list[Row]) -> dict[str, dict[str, str]]:
    """Forward / both in milliseconds, and how many times softmax's, by system and shape."""
    times = {
        (shape_of(row), row["system"], row["pass"]): row["median_ms"]
        for row in rows
        if row["status"] == "ok"
    }
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        shape, system = shape_of(row), row["system"]
        own, base = ([times.get((shape, s, p)) for p in PASSES] for s in (system, "softmax"))
        ratios = [a / b if a and b else None for a, b in zip(own, base, strict=True)]
        lines = [" / ".join(digits(x) for x in own)]
        lines += [" / ".join(digits(x) for x in ratios) + " ×"] if any(ratios) else []
        cells.setdefault(system, {})[shape] = "\n".join(lines) if any(own) else "–"
    return cells


def shape_of(row: Row) -> str:
    """Tokens and batch, and below them channels and heads."""
    return f"{int(row['tokens']):,} × {row['batch']}\n{row['dim']}/{row['heads']}"


def digits(number: float | None) -> str:
    """Three of them, or a dash.

    >>> digits(0.01234), digits(12.345), digits(1234.5), digits(None)
    ('0.0123', '12.3', '1,234', '–')
    """
    if not number:
        return "–"
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f}"


def default_path(config: LayerBenchmark) -> Path:
    """Named after the hardware and the precision."""
    return measure.default_path("layer", config.device, config.dtype)
