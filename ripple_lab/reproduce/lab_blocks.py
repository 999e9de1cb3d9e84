"""Blocks of the docs on speed, training and detection. Files are those of `benchmarks/results`."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.reproduce.timing import (
    PASSES,
    STEPS,
    Systems,
    layers_on_gpu,
    measured_on,
    timing_table,
)
from ripple_lab.results import Row, committed_results

OP_FILES = "op-nvidia-h200-bfloat16-batch-64.csv", "op-nvidia-h200-bfloat16.csv"
CPU_FILES = ("op-amd-epyc-2-threads-float32.csv",)
MODEL_FILES = ("model-nvidia-h200-bfloat16.csv",)
PAPER_FILES = ("model-width-96-batch-4.csv",)
DETECTION_FILES = ("detection-nvidia-h200-bfloat16.csv",)
CPU_DETECTION_FILES = ("detection-amd-epyc-1-threads-float32.csv",)

ON_GPU: Systems = (
    ("ripple", "ripple tiled triton"),
    ("softmax", "softmax SDPA"),
    ("linear, PyTorch", "linear attention"),
    ("all pairs, kernel", "ripple naive triton"),
    ("tables, kernel", "ripple table triton"),
    ("tables, PyTorch", "ripple table"),
    ("a copy of the same bytes", "floor: a copy of the same bytes"),
)
ON_CPU: Systems = (
    ("ripple", "ripple tiled"),
    ("softmax", "softmax SDPA"),
    ("linear", "linear attention"),
    ("tables", "ripple table"),
    ("tables by autograd", "ripple table by autograd"),
    ("all pairs", "ripple naive"),
)
MODELS: Systems = (
    ("DeiT", "DeiT, softmax SDPA"),
    ("DeiT-LA, PyTorch", "DeiT-LA in PyTorch operations"),
    ("ripple", "ripple, R_max 4"),
)
REACHES: Systems = tuple(
    (name, f"ripple, {name}")
    for name in ("R_max 2", "R_max 4", "R_max 8", "R_max 16", "logarithmic", "dense")
)
PAPER_MODELS: Systems = (
    ("DeiT", "DeiT, softmax SDPA"),
    ("DeiT-LA", "DeiT-LA"),
    ("ripple", "ripple, R_max 4"),
    ("logarithmic", "ripple, logarithmic"),
    ("dense", "ripple, dense"),
    ("tables, PyTorch", "ripple, tables in PyTorch operations"),
    ("all pairs, PyTorch", "ripple, all pairs in PyTorch operations"),
)
ENCODERS: Systems = (("softmax", "softmax"), ("linear", "linear"), ("ripple", "ripple"))


def rows_of(*files: str) -> list[Row]:
    """The rows of some files, one after the other."""
    return [row for name in files for row in committed_results().file(name)]


@dataclass(frozen=True)
class Timed:
    """A table of times, or of memory: what its numbers are, and where they come from."""

    said: str
    files: tuple[str, ...]
    systems: Systems
    passes: tuple[str, ...]
    quantity: str = "median_ms"
    scale: float = 1

    def write(self) -> str:
        rows = [row for row in rows_of(*self.files) if row.get("part", "encoder") == "encoder"]
        table = timing_table(rows, self.systems, self.passes, self.quantity, self.scale)
        return f"{table}\n\n{self.said}; {measured_on(rows)}."


OP = "6 heads of 32 channels, R_max 4"
BOTH = "forward / forward and backward"
STEP = "forward / training step"
TIMED = {
    "speed-op": Timed(f"Milliseconds, {BOTH}; {OP}", OP_FILES, ON_GPU, PASSES),
    "memory-op": Timed(f"Peak megabytes, {BOTH}; {OP}", OP_FILES, ON_GPU[:-1], PASSES, "peak_mb"),
    "speed-op-cpu": Timed(f"Milliseconds, {BOTH}; {OP}", CPU_FILES, ON_CPU, PASSES),
    "speed-model": Timed(f"Milliseconds, {STEP}, as CUDA graphs", MODEL_FILES, MODELS, STEPS),
    "speed-model-called": Timed(
        f"Milliseconds, {STEP}, called from Python", MODEL_FILES, MODELS, STEPS, "as_called_ms"
    ),
    "memory-model": Timed(
        "Peak gigabytes of a training step", MODEL_FILES, MODELS[:2] + REACHES, STEPS[1:],
        "peak_mb", 1e-3,
    ),
    "partitions": Timed(
        f"Milliseconds, {STEP}; models of 12 layers, 9 of ripples", MODEL_FILES, REACHES, STEPS
    ),
    "speed-paper": Timed(
        "Milliseconds of a training step; models of width 96", PAPER_FILES, PAPER_MODELS, STEPS[1:]
    ),
    "detection-speed": Timed(
        f"Milliseconds, {STEP}, one picture", DETECTION_FILES, ENCODERS, STEPS
    ),
    "detection-speed-cpu": Timed(
        f"Milliseconds, {STEP}, one picture", CPU_DETECTION_FILES, ENCODERS, STEPS
    ),
}  # fmt: skip
for _name, _timed in TIMED.items():
    block(_name)(_timed.write)


@block("speed-layer")
def layers() -> str:
    """A line for each system and a column for each shape, since there are more systems."""
    rows = layers_on_gpu()
    if not rows:
        return "Not yet run: `ripple bench layer --device cuda --budget 280`."
    times: dict[tuple[str, str], list[str]] = {}
    for row in rows:  # passes come in their order
        shape = f"{row['tokens']:,} × {row['batch']}, {row['dim']}/{row['heads']}"
        times.setdefault((row["system"], shape), []).append(short(row["median_ms"]))
    shapes = list(dict.fromkeys(shape for _, shape in times))
    systems = dict.fromkeys(system for system, _ in times)
    lines = [[name, *(" / ".join(times.get((name, shape), "–")) for shape in shapes)]
             for name in systems]  # fmt: skip
    said = "Milliseconds, forward / forward and backward, of tokens × images, channels/heads"
    return f"{markdown_table(['layer', *shapes], lines)}\n\n{said}; {measured_on(rows)}."


@block("training-speed")
def training_speed() -> str:
    rows = rows_of("train-graphs-nvidia-h200.csv")
    launched = {(r["recipe"], r["compiled"]): r["step_ms"] for r in rows if not r["graphs"]}
    lines = [
        [
            f"`{row['recipe']}`",
            "yes" if row["compiled"] else "no",
            rounded(row["step_ms"], 1),
            rounded(launched[row["recipe"], row["compiled"]], 1),
            rounded(row["kernels_ms"], 1),
            rounded(row["images_per_second"], 0),
            rounded(row["whole_epoch_images_per_second"], 0),
        ]
        for row in rows
        if row["graphs"]
    ]  # fmt: skip
    headings = ("recipe", "compiled", "step, ms", "without graphs, ms", "kernels, ms")
    headings += ("images/s in steps", "in an epoch")
    return f"{markdown_table(headings, lines, words=2)}\n\nOn one {rows[0]['hardware']}."


@block("stability")
def stability() -> str:
    rows = rows_of("stability-nvidia-h200.csv")

    def seeds(recipe: str, name: str) -> str:
        return ", ".join(rounded(row[name], 1) for row in rows if row["recipe"] == recipe)

    lines = [
        [system, *(seeds(f"cifar100-20-{recipe}-tiny", name) for name in
                   ("top1", "gradient_norm_median", "gradient_norm_max"))]
        for system, recipe in (("DeiT", "deit"), ("DeiT-LA", "deit-la"), ("ripple", "ripple"))
    ]  # fmt: skip
    headings = ("system", "top-1 %, by seed", "median gradient norm after warm-up", "largest")
    return markdown_table(headings, lines)


@block("strength")
def strength() -> str:
    """What ε leaves of the attention, and the features that died, of three trained models."""
    models = (
        ("12 layers, 60 epochs", "short-ripple-tiny"),
        ("12 layers, 100 epochs", "100-epochs-ripple-tiny"),
        ("4 layers, 300 epochs, feature maps not decayed", "4-layers-ripple4-300"),
    )
    lines = []
    for label, name in models:
        rows = rows_of(f"strength-cifar100-{name}.csv")
        cells = [f"{_by_layer(rows, column)}" for column in
                 ("strength", "share_below_half", "dead_features_of_all_heads")]  # fmt: skip
        lines.append([label, *cells])
    headings = ("model", "strength of attention, %", "tokens below half, %", "dead features, %")
    said = "The least and the most of a layer, over 100 test images, by `ripple analyze`"
    return f"{markdown_table(headings, lines)}\n\n{said}."


@block("detection-shapes")
def shapes() -> str:
    lines = []
    for label, system in (("softmax", "smca"), ("linear", "smca-la"), ("ripple", "smca-ripple")):
        rows = rows_of(f"shapes-{system}-amd-epyc-1-threads.csv")
        *_, last = (row for row in rows if row["kind"] == "evaluation")
        values = [rounded(last[name], 3) for name in ("ap", "ap50", "ap75")]
        lines.append([label, *values, f"{last['step']:,}"])
    return markdown_table(("encoder", "AP", "AP50", "AP75", "steps"), lines)


def _by_layer(rows: Iterable[Row], column: str) -> str:
    layers: dict[int, list[float]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(100 * row[column])
    means = [statistics.mean(values) for values in layers.values()]
    return f"{rounded(min(means), 0)} to {rounded(max(means), 0)}"
