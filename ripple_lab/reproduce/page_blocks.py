"""Blocks of the pages on performance, CIFAR-100 and training: tables of result files."""

from collections.abc import Iterable

from ripple_lab import paper
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.reproduce.queries import at_epochs, best, settings
from ripple_lab.results import Row, committed_results

GPU_OPERATORS = ("op-nvidia-h200-bfloat16-batch-64.csv", "op-nvidia-h200-bfloat16.csv")
GPU_MODELS = "model-nvidia-h200-bfloat16.csv"
CPU_OPERATORS = "op-amd-epyc-2-threads-float32.csv"
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
SYSTEMS = {"DeiT-LA": "deit-la-tiny", "DeiT": "deit-tiny", "ConViT": "convit-tiny"}
SYSTEMS["ripple"] = "ripple-tiny"


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


def top1(recipe: str, epochs: int) -> float | None:
    """Top-1 in percent of a CIFAR-100 recipe with that many epochs, the mean of its seeds."""
    seeds = at_epochs(f"cifar100-{recipe}", epochs, committed_results())
    return seeds.mean("top1") if seeds else None


def percent(number: float | None) -> str:
    """One decimal, or a dash."""
    return "–" if number is None else rounded(number, 1)


def difference(number: float | None, other: float | None) -> str:
    """How much more the one is than the other, with its sign."""
    if number is None or other is None:
        return "–"
    points = rounded(number - other, 1).replace("-", "−")
    return f"+{points}" if number > other else points


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


@block("cifar100-300-epochs")
def cifar100_300_epochs() -> str:
    """Top-1 after 60 and 300 epochs, and the paper's after 300."""
    recipes = {f"{name}, 4 layers": f"{recipe}4" for name, recipe in SYSTEMS.items()
               if name in ("DeiT-LA", "ripple")} | SYSTEMS  # fmt: skip
    lines = [[name, *_ours_and_theirs(recipe)] for name, recipe in recipes.items()]
    deit4 = [_of_four_layers("deit-tiny", epochs) for epochs in (60, 300)]
    lines.insert(1, ["DeiT, 4 layers", *map(percent, deit4), "–"])
    return markdown_table(["top-1 %", "ours, 60 epochs", "ours, 300", "the paper, 300"], lines)


@block("cifar100-setups")
def cifar100_setups() -> str:
    """What each part of ripple attention is worth."""
    setups = {
        "ripple, R_max 4": "ripple-tiny",
        "R_max 2": "ripple-tiny-r2",
        "R_max 8": "ripple-tiny-r8",
        "R_max 16": "ripple-tiny-r16",
        "logarithmic rings": "ripple-tiny-logarithmic",
        "fixed weights": "ripple-tiny-fixed",
        "softmax weights": "ripple-tiny-softmax",
        "truncated: nothing beyond R_max": "ripple-tiny-truncated",
        "DeiT-LA": "deit-la-tiny",
    }
    lines = [[name, *_ours_and_theirs(recipe)] for name, recipe in setups.items()]
    return markdown_table(["top-1 %", "ours, 60 epochs", "ours, 300", "the paper, 300"], lines)


@block("cifar100-no-positions")
def cifar100_no_positions() -> str:
    """What a model loses without position embeddings."""
    lines = []
    for name, recipe in SYSTEMS.items():
        pairs = [(top1(recipe, epochs), top1(f"{recipe}-no-ape", epochs)) for epochs in (60, 300)]
        pairs.append((_paper_top1(recipe), _paper_top1(f"{recipe}-no-ape")))
        changes = [difference(without, given) for given, without in pairs]
        lines.append([name, *map(percent, pairs[0]), *changes])
    headings = ["top-1 %, 60 epochs", "with positions", "without", "change"]
    return markdown_table([*headings, "after 300 epochs", "in the paper"], lines)


@block("cifar100-schedules")
def cifar100_schedules() -> str:
    """How far ripple and DeiT-LA are from DeiT, by schedule."""
    schedules = (
        ("light augmentation, 20 epochs", "cifar100-20-", 20),
        ("the paper's, 60 epochs", "cifar100-short-", 60),
        ("the paper's, 100 epochs", "cifar100-short-", 100),
        ("light augmentation, 60 epochs", "cifar100-20-", 60),
        ("the paper's, 300 epochs", "cifar100-", 300),
    )
    systems = [SYSTEMS[name] for name in ("DeiT", "ripple", "DeiT-LA")]
    found = {
        name: [_own_top1(prefix + recipe, epochs) for recipe in systems]
        for name, prefix, epochs in schedules
    }
    found["the paper's own results"] = [_paper_top1(recipe) for recipe in systems]
    lines = [
        [name, percent(deit), *(difference(other, deit) for other in others)]
        for name, (deit, *others) in found.items()
    ]
    return markdown_table(["schedule", "DeiT, top-1 %", "ripple's lead", "DeiT-LA's lead"], lines)


@block("cifar100-seeds")
def cifar100_seeds() -> str:
    """Top-1 of several seeds after 60 epochs."""
    lines = []
    for name in ("DeiT", "ripple"):
        seeds = at_epochs(f"cifar100-{SYSTEMS[name]}", 60, committed_results())
        assert seeds
        runs = ", ".join(f"{run['top1']:.2f}" for run in seeds.runs)
        lines.append([name, runs, percent(seeds.mean("top1"))])
    return markdown_table(["top-1 %", "seeds 0, 1, …", "mean"], lines)


@block("training-stability")
def training_stability() -> str:
    """Accuracy and gradient norms of 20 epochs, by seed."""
    rows = rows_of(STABILITY)
    lines = []
    for name in ("DeiT", "DeiT-LA", "ripple"):
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{SYSTEMS[name]}"]
        columns = ("top1", "gradient_norm_median", "gradient_norm_max")
        lines.append([name, *(", ".join(percent(run[key]) for run in runs) for key in columns)])
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


def _ours_and_theirs(recipe: str) -> list[str]:
    """Ours after 60 and 300 epochs, and the paper's."""
    return [percent(top1(recipe, 60)), percent(top1(recipe, 300)), percent(_paper_top1(recipe))]


def _own_top1(recipe: str, epochs: int) -> float | None:
    """Of the runs of this recipe itself, not of others with the same model."""
    runs = [it for it in settings(recipe, "top1", committed_results()) if it.recipe == recipe]
    found = best(runs, epochs)
    return found.mean("top1") if found else None


def _of_four_layers(recipe: str, epochs: int) -> float | None:
    """Of a recipe whose depth was changed to four layers."""
    for run in committed_results().of_kind("runs"):
        named = run["recipe"].startswith("cifar100") and run["recipe"].endswith(f"-{recipe}")
        if named and run["epochs"] == epochs and "model.depth: None → 4" in run["changes"]:
            return float(run["top1"])
    return None


def _paper_top1(recipe: str) -> float | None:
    """The paper's top-1 of a CIFAR-100 recipe, without its prefix."""
    name = f"cifar100-{recipe}"
    accuracy = paper.ACCURACY.get(name)
    return accuracy[0] if accuracy else paper.TOP1_OF_TABLE_8.get(name)
