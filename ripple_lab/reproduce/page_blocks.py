"""Blocks of the pages on performance and training: tables of result files."""

from collections.abc import Iterable

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.results import Row, committed_results

GPU_OPERATORS = ("op-nvidia-h200-bfloat16-batch-64.csv", "op-nvidia-h200-bfloat16.csv")
GPU_MODELS = "model-nvidia-h200-bfloat16.csv"
CPU_OPERATORS = "op-amd-epyc-2-threads-float32.csv"
CPU_WIDE = (
    "op-logarithmic-amd-epyc-2-threads-float32.csv",
    "op-logarithmic-64-channels-amd-epyc-2-threads-float32.csv",
)
WIDE = {
    "shared tiles": "ripple tile sums",
    "the paper's tables": "ripple table",
    "softmax (SDPA)": "softmax SDPA",
    "ripple, R_max 4": "ripple, thin rings",
}
OPERATORS = {
    "ripple": "ripple tiled triton",
    "softmax (SDPA)": "softmax SDPA",
    "linear attention": "linear attention",
    "the paper's tables": "ripple table",
    "least possible": "floor: a copy of the same bytes",
}
MODELS = {
    "ripple": "ripple, R_max 4",
    "DeiT (SDPA)": "DeiT, softmax SDPA",
    "DeiT-LA": "DeiT-LA in PyTorch operations",
}
REACHES = {
    name: f"ripple, {name}"
    for name in ("R_max 2", "R_max 4", "R_max 8", "R_max 16", "logarithmic", "dense")
}
STABILITY = "stability-nvidia-h200.csv"
TRAINING = "train-graphs-nvidia-h200.csv"
CPU_EPOCH = "cifar100-epoch-amd-epyc-2-threads.csv"


def rows_of(*names: str) -> list[Row]:
    """The rows of some result files."""
    return [row for name in names for row in committed_results().file(name)]


def with_sources(text: str, *names: str) -> str:
    """A table and the files it was made of."""
    links = ", ".join(f"[{name}](../benchmarks/results/{name})" for name in names)
    return f"{text}\n\nFrom {links}."


def find(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The first row with these values."""
    return next((row for row in rows if all(row[key] == wanted[key] for key in wanted)), None)


def by_tokens(rows: list[Row], systems: dict[str, str], value: str = "median_ms") -> str:
    """One row a grid and pass, one column a system."""
    found = {(*_size(row), row["system"]): row[value] for row in rows}
    lines = []
    for tokens, batch, step in dict.fromkeys(map(_size, rows)):
        times = (found.get((tokens, batch, step, system)) for system in systems.values())
        size = f"{tokens:,} × {batch}"
        lines.append([size, step.replace("+", " and "), *map(short, times)])
    return markdown_table(["tokens × images", "pass", *systems], lines, words=2)


def _size(row: Row) -> tuple[int, int, str]:
    return row["tokens"], row["batch"], row["pass"]


@block("performance-models")
def performance_models() -> str:
    """Whole models on a GPU, milliseconds; and how many times as long DeiT takes as ripple."""
    ratio = {"DeiT : ripple": "ratio"}
    return with_sources(by_tokens(_with_ratio(rows_of(GPU_MODELS)), MODELS | ratio), GPU_MODELS)


def _with_ratio(rows: list[Row]) -> list[Row]:
    """The rows, and after the last of each grid and pass DeiT's time by ripple's."""
    ratios = []
    for row in rows:
        if row["system"] == MODELS["ripple"]:
            same = {key: row[key] for key in ("tokens", "batch", "pass")}
            deit = find(rows, system=MODELS["DeiT (SDPA)"], **same)
            if deit:
                median = deit["median_ms"] / row["median_ms"]
                ratios.append(same | {"system": "ratio", "median_ms": median})
    return rows + ratios


@block("performance-operator")
def performance_operator() -> str:
    """The operator on a GPU, milliseconds."""
    return with_sources(by_tokens(rows_of(*GPU_OPERATORS), OPERATORS), *GPU_OPERATORS)


@block("performance-reach")
def performance_reach() -> str:
    """Whole models by reach and partition, milliseconds."""
    return by_tokens(rows_of(GPU_MODELS), REACHES)


@block("performance-memory")
def performance_memory() -> str:
    """Peak memory of whole models on a GPU in a training step, GB."""
    rows = [
        row | {"gigabytes": row["peak_mb"] and row["peak_mb"] / 1e3}
        for row in rows_of(GPU_MODELS)
        if row["pass"] == "training step"
    ]
    far = {name: REACHES[name] for name in ("R_max 16", "logarithmic", "dense")}
    return by_tokens(rows, MODELS | far, "gigabytes")


@block("performance-cpu")
def performance_cpu() -> str:
    """The operator on a CPU, milliseconds."""
    systems = {name: system for name, system in OPERATORS.items() if "floor" not in system}
    systems["ripple"] = "ripple tiled"
    return with_sources(by_tokens(rows_of(CPU_OPERATORS), systems), CPU_OPERATORS)


@block("performance-cpu-wide")
def performance_cpu_wide() -> str:
    """Logarithmic rings on a CPU, milliseconds, by the channels of a head."""
    lines = []
    for name in CPU_WIDE:
        rows = rows_of(name)
        for step in dict.fromkeys(row["pass"] for row in rows):
            times = {row["system"]: row["median_ms"] for row in rows if row["pass"] == step}
            cells = [short(times[system]) for system in WIDE.values()]
            lines.append([str(rows[0]["head_dim"]), step.replace("+", " and "), *cells])
    return with_sources(markdown_table(["channels", "pass", *WIDE], lines, words=2), *CPU_WIDE)


@block("training-stability")
def training_stability() -> str:
    """Accuracy and gradient norms of 20 epochs, by seed."""
    rows = rows_of(STABILITY)
    lines = []
    systems = {"DeiT": "deit-tiny", "DeiT-LA": "deit-la-tiny", "ripple": "ripple-tiny"}
    for name, recipe in systems.items():
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{recipe}"]
        columns = ("top1", "gradient_norm_median", "gradient_norm_max")
        lines.append([name, *(", ".join(rounded(run[key], 1) for run in runs) for key in columns)])
    headings = ["by seed", "top-1 %", "median gradient norm after warm-up", "largest"]
    return with_sources(markdown_table(headings, lines), STABILITY)


@block("training-speed")
def training_speed() -> str:
    """Images a second of the CIFAR-100 recipes, with CUDA graphs."""
    rows = [row for row in rows_of(TRAINING) if row["graphs"]]
    lines = [
        [f"`{row['recipe']}`", "yes" if row["compiled"] else "no", f"{row['step_ms']:.1f}",
         f"{row['images_per_second']:,.0f}", f"{row['whole_epoch_images_per_second']:,.0f}"]
        for row in rows
    ]  # fmt: skip
    headings = ["recipe", "compiled", "step, ms", "images/s in steps", "images/s in an epoch"]
    return with_sources(markdown_table(headings, lines), TRAINING)


@block("training-cpu")
def training_cpu() -> str:
    """An epoch of CIFAR-100 on two cores, from two runs on parts of it."""
    part, more = sorted(rows_of(CPU_EPOCH), key=lambda row: row["images"])
    each = (more["cpu_seconds"] - part["cpu_seconds"]) / (more["images"] - part["images"])
    training, rest = 50_000 * each, part["cpu_seconds"] - part["images"] * each
    parts = {
        "to train on 50,000 images": training,
        "to start, look at the ripples and evaluate on 10,000 images": rest,
        "an epoch": training + rest,
    }
    lines = [[name, *(f"{x / 60:.1f}" for x in (time, time / 2))] for name, time in parts.items()]
    headings = [f"`{part['recipe']}`, {part['dtype']}, {part['hardware']}"]
    headings += ["minutes of CPU time", "on two cores"]
    return with_sources(markdown_table(headings, lines), CPU_EPOCH)
