"""The operator's time and memory, each algorithm beside linear attention and PyTorch's softmax."""

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention import dispatch
from ripple_attention.functional import (
    linear_attention,
    ripple_attention,
    ripple_softmax_attention,
)
from ripple_attention.ops.common import accumulation_dtype, safe_divide
from ripple_attention.partition import Partition, chebyshev, foveal, logarithmic
from ripple_lab import machine, results
from ripple_lab.bench import measure

System = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]

PASSES = ("forward", "forward+backward")
FLOOR = "floor: a copy of the same bytes"
THIN = "ripple, thin rings"  # beside other rings: what these cost more
AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}


PARTITIONS: dict[str, Callable[[int], Partition]] = {
    "chebyshev": chebyshev,
    "logarithmic": logarithmic,
    "foveal": foveal,
}


@dataclass(frozen=True)
class OpBenchmark:
    """What is measured: square grids of `sides`², after the feature map, M = E = head_dim."""

    sides: tuple[int, ...] = (14, 32, 64, 128)
    batch: int = 1
    heads: int = 6
    head_dim: int = 32
    max_distance: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    rounds: int = 7
    only: tuple[str, ...] = ()  # names of systems; all unless given
    patience: float = 5.0
    seed: int = 0
    partition: str = "chebyshev"

    @property
    def groups(self) -> Partition:
        """The partition of `max_distance`."""
        return PARTITIONS[self.partition](self.max_distance)


def systems(partition: Partition, config: OpBenchmark | None = None) -> dict[str, System]:
    """Everything that is compared, by name; kernels where they can run."""
    config = config or OpBenchmark()

    def ripple(implementation: str) -> System:
        return lambda q, k, v, weights: ripple_attention(
            q, k, v, weights, partition=partition, implementation=implementation
        )

    def can_run(name: str) -> bool:
        device, width = torch.device(config.device), config.head_dim
        dtype, machine = getattr(torch, config.dtype), dispatch.kernels_can_run(device.type)
        problem = dispatch.Problem(
            (1, 1), width, width, partition.radii, dtype, device.type, machine,
            tile_radii=partition.tile_radii, tile=partition.tile,
        )  # fmt: skip
        backend = next(b for b in dispatch.BACKENDS if b.name == name)
        return backend.supports(problem) is None

    def thin(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        rings = thin_rings(partition)
        return ripple_attention(q, k, v, weights[..., : rings.num_groups], partition=rings)

    kernels = ("tiled_triton", "tile_sums_triton", "table_triton", "naive_triton")
    able = [name for name in (*kernels, "tiled", "tile_sums", "table") if can_run(name)]
    paper = {"ripple table by autograd": lambda *x: table_by_autograd(partition, *x)}
    return {
        **{f"ripple {name.replace('_', ' ')}": ripple(name) for name in able},
        **({} if partition.tile else paper),
        "ripple naive": ripple("naive"),
        **({} if config.partition == "chebyshev" else {THIN: thin}),
        "linear attention": lambda q, k, v, _: linear_attention(q, k, v),
        "softmax SDPA": lambda q, k, v, _: softmax_attention(q, k, v),
        "softmax with ripples": lambda q, k, v, weights: ripple_softmax_attention(
            q, k, v, weights, partition=partition
        ),
    }


def thin_rings(partition: Partition) -> Partition:
    """The paper's rings, R_max 4; fewer where a partition has fewer groups."""
    return chebyshev(min(4, partition.num_groups - 1))


def make_floor(inputs: tuple[Tensor, ...], step_name: str) -> measure.Step:
    """A copy that moves as many bytes as a pass must: each input read once, each result written.

    Backward, the inputs, the output and its gradient are read, and four gradients written.
    """
    of_inputs = sum(x.numel() * x.element_size() for x in inputs)
    of_output = inputs[2].numel() * inputs[2].element_size()
    moved = of_inputs + of_output
    if step_name != "forward":
        moved += 2 * of_inputs + 2 * of_output
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=inputs[0].device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def table_by_autograd(
    partition: Partition, q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor
) -> Tensor:
    """The paper's algorithm 1, differentiated by autograd through every box."""
    dtype = accumulation_dtype(v)
    q, k, v, weights = (x.to(dtype).permute(0, 3, 1, 2, 4) for x in (q, k, v, spatial_weights))
    values = F.pad(v, (0, 1), value=1)
    H, W = q.shape[2:4]
    table = (k.unsqueeze(-1) * values.unsqueeze(-2)).cumsum(2).cumsum(3)
    table = F.pad(table, (0, 0, 0, 0, 1, 0, 1, 0))  # (B, N, H+1, W+1, M, E+1)
    rows, columns = torch.arange(H, device=q.device)[:, None], torch.arange(W, device=q.device)
    result = previous = torch.zeros((), device=q.device, dtype=q.dtype)
    for group, radius in enumerate(partition.radii):
        top, bottom = (rows - radius).clamp(min=0), (rows + radius + 1).clamp(max=H)
        left, right = (columns - radius).clamp(min=0), (columns + radius + 1).clamp(max=W)
        current = table[:, :, bottom, right] - table[:, :, top, right]
        current = current - table[:, :, bottom, left] + table[:, :, top, left]
        result = result + weights[..., group, None, None] * (current - previous)
        previous = current
    result = result + weights[..., -1:, None] * (table[:, :, -1:, -1:] - previous)
    sums = (q.unsqueeze(-2) @ result).squeeze(-2)
    out = safe_divide(sums[..., :-1], sums[..., -1:])
    return out.permute(0, 2, 3, 1, 4).to(spatial_weights.dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused softmax attention over the same tensors."""
    queries, keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(queries, keys, values)
    return out.transpose(1, 2).reshape(v.shape)


def run(config: OpBenchmark, progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Checks, then times, every system at every size; yields a row for each and each pass."""
    device = torch.device(config.device)
    partition = config.groups
    known = systems(partition, config)
    common = {
        "hardware": machine.hardware(device),
        "torch": torch.__version__,
        **{name: asdict(config)[name] for name in ("dtype", "batch", "heads", "head_dim")},
        "max_distance": config.max_distance,
    }
    if config.partition != "chebyshev":
        common["partition"] = config.partition
    for side in config.sides:
        inputs = make_inputs(config, side, partition)
        runnable, refused = {}, {}
        wanted = [name for name in known if not config.only or name in config.only]
        for name in wanted:
            needed = expected_bytes(name, config, side)
            if needed > 0.8 * machine.available_bytes(device):
                refused[name] = f"skipped: needs about {needed / 1e9:.0f} GB"
            else:
                runnable[name] = known[name]
        progress(f"{side}×{side} tokens: agreement")
        errors = disagreements(runnable, inputs, partition, config)
        for step_name in PASSES:
            steps = {
                name: make_step(system, inputs, step_name) for name, system in runnable.items()
            }
            steps[FLOOR] = make_floor(inputs, step_name)
            progress(f"{side}×{side} tokens: time, {step_name}")
            times = measure.interleaved_seconds(
                steps, device, config.rounds, config.patience, as_graphs=True
            )
            for name in (*wanted, FLOOR):
                row = {**common, "height": side, "width": side, "tokens": side * side}
                row |= {"system": name, "pass": step_name, "status": refused.get(name, "ok")}
                if name in steps:
                    progress(f"{side}×{side} tokens: memory, {name}")
                    row |= measure.summary(times[name])
                    row["peak_mb"] = round(measure.peak_bytes(steps[name], device) / 1e6, 4)
                    row["relative_error"] = errors.get(name, "")
                yield row


def make_inputs(config: OpBenchmark, side: int, partition: Partition) -> tuple[Tensor, ...]:
    """q, k, v as views of one projection, and weights, all asking for gradients."""
    generator = torch.Generator().manual_seed(config.seed)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    shape = (config.batch, side, side, 3, config.heads, config.head_dim)
    q, k, v = torch.randn(shape, generator=generator).to(device, dtype).unbind(3)
    weights = torch.randn(*v.shape[:-1], partition.num_groups, generator=generator)
    weights = weights.softmax(-1).to(device, dtype)
    return tuple(x.requires_grad_() for x in (q.relu(), k.relu(), v, weights))


def make_step(system: System, inputs: tuple[Tensor, ...], step_name: str) -> measure.Step:
    """One pass of a system, as something to call."""
    if step_name == "forward":

        def forward() -> None:
            with torch.no_grad():
                system(*inputs)

        return forward
    upstream = torch.ones_like(inputs[2])

    def forward_and_backward() -> None:
        out = system(*inputs)
        torch.autograd.grad(out, inputs, upstream, allow_unused=True)

    return forward_and_backward


def disagreements(
    runnable: dict[str, System],
    inputs: tuple[Tensor, ...],
    partition: Partition,
    config: OpBenchmark,
) -> dict[str, float]:
    """The relative error of each system; refuses to go on where one is wrong.

    Ripple systems are compared with the definition, or, if that does not fit, with all pairs by
    kernels or with tiles; thin rings with shared sums of the same; linear attention with ripple
    attention of uniform weights. Softmax, with or without ripples, is another function and is not
    checked.
    """
    tolerance = AGREEMENT[getattr(torch, config.dtype)]
    known = systems(partition, config)
    references = ["ripple naive triton", "ripple tiled", "ripple tile sums"]
    if "ripple naive" in runnable:
        references = ["ripple naive"]
    reference_name = next(name for name in references if name in known)
    errors: dict[str, float] = {}
    others: dict[str, Tensor] = {}
    q, k, v, weights = inputs
    with torch.no_grad():
        reference = {**known, **runnable}[reference_name](*inputs)
        if "linear attention" in runnable:
            uniform = torch.full_like(weights, 1 / partition.num_groups)
            others["linear attention"] = known["ripple tile sums"](q, k, v, uniform)
        if THIN in runnable:
            rings = thin_rings(partition)
            by_sums = systems(rings, config)["ripple tile sums"]
            others[THIN] = by_sums(q, k, v, weights[..., : rings.num_groups])
        for name, system in runnable.items():
            if name.startswith("softmax"):
                continue
            expected = others.get(name, reference)
            error = float((system(*inputs) - expected).norm() / expected.norm())
            if not error <= tolerance:
                raise RuntimeError(
                    f"{name} disagrees with {reference_name} by {error:.1e} (at most "
                    f"{tolerance:.0e} is rounding): nothing was timed"
                )
            errors[name] = float(f"{error:.2e}")
    return errors


def expected_bytes(name: str, config: OpBenchmark, side: int) -> int:
    """A guess at the memory of both passes, so that nothing starts that cannot fit."""
    item = max(4, getattr(torch, config.dtype).itemsize)
    images_and_heads = config.batch * config.heads
    tokens = side * side
    if name in ("ripple naive", "softmax with ripples"):
        return 6 * item * images_and_heads * tokens**2
    if name == "ripple table by autograd":
        states = 6 * config.groups.num_groups
        return item * images_and_heads * tokens * config.head_dim * (config.head_dim + 1) * states
    return 0


def read_csv(path: Path) -> list[Row]:
    """The rows of a benchmark."""
    try:
        rows = results.read_csv(path)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV of `ripple bench op` ({error})") from None
    if not rows or not {"tokens", "system", "pass", "status", "median_ms"} <= rows[0].keys():
        raise ValueError(f"{path} is not a CSV of `ripple bench op`: it lacks rows or columns")
    return rows


def short(number: float) -> str:
    """A number in as few digits as a reader needs."""
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def markdown_table(rows: list[Row]) -> str:
    """Milliseconds, forward and backward, of every system at every size, and peak memory."""
    rows = [row for row in rows if row["pass"] == "forward+backward"]
    sizes = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = [
        "| forward and backward | " + " | ".join(f"{size:,} tokens" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = [
            f"{short(row['median_ms'])} ms, {short(row['peak_mb'])} MB"
            if row["status"] == "ok"
            else "does not fit"
            for row in rows
            if row["system"] == system
        ]
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def default_path(config: OpBenchmark) -> Path:
    """Named after the rings and heads, if they are not the usual ones, hardware and precision."""
    rings = "" if config.partition == "chebyshev" else f"-{config.partition}"
    heads = "" if config.head_dim == OpBenchmark.head_dim else f"-{config.head_dim}-channels"
    return measure.default_path(f"op{rings}{heads}", config.device, config.dtype)
