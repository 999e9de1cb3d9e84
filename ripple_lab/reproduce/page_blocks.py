"""Blocks of the pages under docs/: tables of result files, and of counts made on the spot."""

from collections.abc import Iterable, Sequence

from ripple_lab import paper
from ripple_lab.reproduce.blocks import block
from ripple_lab.results import Row, read_csv, results_folder

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
SHORT, LONG = "cifar100-short-nvidia-h200.csv", "cifar100-300-epochs-nvidia-h200.csv"
FOUR_LAYERS, SEEDS = "cifar100-4-layers-nvidia-h200.csv", "cifar100-seeds-nvidia-h200.csv"
NO_POSITIONS = "cifar100-no-ape-nvidia-h200.csv"
LIGHT, STABILITY = "cifar100-light-nvidia-h200.csv", "stability-nvidia-h200.csv"
HUNDRED = "cifar100-100-epochs-nvidia-h200.csv"
TRAINING = "train-graphs-nvidia-h200.csv"
GPU_DETECTION = "detection-nvidia-h200-bfloat16.csv"
CPU_DETECTION = "detection-amd-epyc-1-threads-float32.csv"
SHAPES = "shapes-{}-amd-epyc-1-threads.csv"
SYSTEMS = {"DeiT-LA": "deit-la-tiny", "DeiT": "deit-tiny", "ConViT": "convit-tiny"}
SYSTEMS["ripple"] = "ripple-tiny"


def rows_of(*names: str) -> list[Row]:
    """The rows of some result files."""
    return [row for name in names for row in read_csv(results_folder() / name)]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]])


def with_sources(text: str, *names: str) -> str:
    """A table and the files it was made of."""
    links = ", ".join(f"[{name}](../benchmarks/results/{name})" for name in names)
    return f"{text}\n\nFrom {links}."


def significant(number: float | None) -> str:
    """Three digits: 0.0246, 1.26, 185; a dash for what was not measured."""
    if number is None:
        return "–"
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def find(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The first row with these values."""
    return next((row for row in rows if all(row[key] == wanted[key] for key in wanted)), None)


def top1(file: str, recipe: str, **wanted: object) -> float | None:
    """Top-1 accuracy in percent of a run."""
    row = find(rows_of(file), recipe=recipe, **wanted)
    return row and row["top1"]


def percent(number: float | None) -> str:
    """One decimal, or a dash."""
    return "–" if number is None else f"{number:.1f}"


def difference(number: float | None, other: float | None) -> str:
    """How much more the one is than the other, with its sign; blank for none."""
    if number is None or other is None:
        return "–"
    return f"{number - other:+.1f}".replace("-", "−") if number != other else ""


def by_tokens(rows: list[Row], systems: dict[str, str], value: str = "median_ms") -> str:
    """One row a grid and pass, one column a system."""
    sizes = dict.fromkeys((row["tokens"], row["batch"], row["pass"]) for row in rows)
    lines = []
    for tokens, batch, step in sizes:
        found = {row["system"]: row[value] for row in rows
                 if (row["tokens"], row["batch"], row["pass"]) == (tokens, batch, step)}  # fmt: skip
        numbers = [significant(found.get(system)) for system in systems.values()]
        lines.append([f"{tokens:,} × {batch}", step.replace("+", " and "), *numbers])
    return table(["tokens × images", "pass", *systems], lines)


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
    systems = (
        ("DeiT-LA, 4 layers", "deit-la-tiny4", top1(SHORT, "cifar100-short-deit-la-tiny4"), None),
        ("DeiT, 4 layers", None, top1(FOUR_LAYERS, "cifar100-short-deit-tiny"),
         top1(FOUR_LAYERS, "cifar100-deit-tiny")),
        ("ripple, 4 layers", "ripple-tiny4", top1(SHORT, "cifar100-short-ripple-tiny4"),
         top1(FOUR_LAYERS, "cifar100-ripple-tiny4")),
        *((name, recipe, top1(SHORT, f"cifar100-short-{recipe}"),
           top1(LONG, f"cifar100-{recipe}")) for name, recipe in SYSTEMS.items()),
    )  # fmt: skip
    lines = [
        [name, percent(short), percent(long), percent(_paper_top1(recipe))]
        for name, recipe, short, long in systems
    ]
    headings = ["top-1 %", "ours, 60 epochs", "ours, 300", "the paper, 300"]
    return with_sources(table(headings, lines), SHORT, LONG, FOUR_LAYERS)


@block("cifar100-setups")
def cifar100_setups() -> str:
    """What each part of ripple attention is worth: 60 epochs here, 300 in the paper."""
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
    found = {name: top1(SHORT, f"cifar100-short-{recipe}") for name, recipe in setups.items()}
    first, theirs = found["ripple, R_max 4"], _paper_top1("ripple-tiny")
    lines = [
        [name, percent(found[name]), difference(found[name], first),
         percent(_paper_top1(recipe)), difference(_paper_top1(recipe), theirs)]
        for name, recipe in setups.items()
    ]  # fmt: skip
    headings = ["top-1 %", "ours, 60 epochs", "against ripple", "the paper, 300", "against ripple"]
    return with_sources(table(headings, lines), SHORT)


@block("cifar100-no-positions")
def cifar100_no_positions() -> str:
    """Top-1 with and without position embeddings: 60 epochs here, 300 in the paper."""
    lines = []
    for name, recipe in SYSTEMS.items():
        ours = top1(SHORT, f"cifar100-short-{recipe}")
        without = top1(NO_POSITIONS, f"cifar100-{recipe}-no-ape")
        paper = _paper_top1(recipe), _paper_top1(f"{recipe}-no-ape")
        lines.append([name, percent(ours), percent(without), difference(without, ours),
                      difference(*reversed(paper))])  # fmt: skip
    headings = ["top-1 %", "with", "without", "change", "change in the paper"]
    return with_sources(table(headings, lines), SHORT, NO_POSITIONS)


@block("cifar100-schedules")
def cifar100_schedules() -> str:
    """How far ripple and DeiT-LA are from DeiT, by schedule."""
    schedules = (
        ("light augmentation, 20 epochs, seed 0", STABILITY, "cifar100-20-", {"seed": 0}),
        ("the paper's, 60 epochs, seed 0", SHORT, "cifar100-short-", {}),
        ("the paper's, 100 epochs", HUNDRED, "cifar100-short-", {}),
        ("light augmentation, 60 epochs", LIGHT, "cifar100-20-", {}),
        ("the paper's, 300 epochs", LONG, "cifar100-", {}),
    )
    lines = []
    for name, file, prefix, wanted in schedules:
        deit, la, ripple = (
            top1(file, f"{prefix}{SYSTEMS[system]}", **wanted)
            for system in ("DeiT", "DeiT-LA", "ripple")
        )
        lines.append([name, percent(deit), difference(ripple, deit), difference(la, deit)])
    deit, la, ripple = (_paper_top1(SYSTEMS[name]) for name in ("DeiT", "DeiT-LA", "ripple"))
    theirs = ["the paper's own results", percent(deit), difference(ripple, deit)]
    lines.append([*theirs, difference(la, deit)])
    text = table(["schedule", "DeiT, top-1 %", "ripple's lead", "DeiT-LA's lead"], lines)
    return with_sources(text, STABILITY, SHORT, HUNDRED, LIGHT, LONG)


@block("cifar100-seeds")
def cifar100_seeds() -> str:
    """Top-1 of several seeds after 60 epochs."""
    lines = []
    for name in ("DeiT", "ripple"):
        recipe = f"cifar100-short-{SYSTEMS[name]}"
        runs = [row["top1"] for row in rows_of(SHORT, SEEDS) if row["recipe"] == recipe]
        mean = sum(runs) / len(runs)
        lines.append([name, ", ".join(f"{value:.2f}" for value in runs), percent(mean)])
    return with_sources(table(["top-1 %", "seeds 0, 1, …", "mean"], lines), SHORT, SEEDS)


@block("training-stability")
def training_stability() -> str:
    """Accuracy and gradient norms of 20 epochs, by seed."""
    rows = rows_of(STABILITY)
    lines = []
    for name in ("DeiT", "DeiT-LA", "ripple"):
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{SYSTEMS[name]}"]
        columns = ("top1", "gradient_norm_median", "gradient_norm_max")
        lines.append([name, *(", ".join(f"{run[key]:.1f}" for run in runs) for key in columns)])
    headings = ["by seed", "top-1 %", "median gradient norm after warm-up", "largest"]
    return with_sources(table(headings, lines), STABILITY)


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
    return with_sources(table(headings, lines), TRAINING)


@block("detector-costs")
def detector_costs() -> str:
    """Parameters and multiply-adds, ours and the paper's; ours are counted on the spot."""
    from ripple_lab.bench.detection import detector_cost  # needs timm and torchvision

    attentions = dict(zip(paper.DETECTORS, ("softmax", "linear", "ripple"), strict=True))
    lines = []
    for name, theirs in paper.DETECTORS.items():
        cost = detector_cost(name)
        lines.append([f"`{name}`", attentions[name], f"{cost.parameters / 1e6:.1f}",
                      f"{theirs['parameters']:.1f}", f"{cost.gflops:.0f} G",
                      f"{theirs['gflops']:.0f} G"])  # fmt: skip
    headings = ["name", "attention in the encoder", "M parameters", "the paper's"]
    return table([*headings, "multiply-adds, 800×1066", "the paper's"], lines)


@block("detection-shapes")
def detection_shapes() -> str:
    """Average precision of the detectors that were trained on shapes."""
    files = {
        "softmax": SHAPES.format("smca"),
        "linear": SHAPES.format("smca-la"),
        "ripple": SHAPES.format("smca-ripple"),
    }
    lines = []
    for name, file in files.items():
        last = [row for row in rows_of(file) if row["kind"] == "evaluation"][-1]
        lines.append([name, *(f"{last[key]:.3f}" for key in ("ap", "ap50", "ap75"))])
    return with_sources(table(["encoder", "AP", "AP50", "AP75"], lines), *files.values())


def _detection_speed(name: str) -> str:
    """One row a grid and pass, one column a system, in milliseconds."""
    names = {"smca_resnet50": "softmax", "smca_la_resnet50": "linear"}
    names["smca_ripple_resnet50"] = "ripple"
    lines: dict[str, dict[str, float]] = {}
    for row in rows_of(name):
        size = f"{row['height']}×{row['width']}"
        size = f"whole detector, {size} pixels" if row["part"] == "detector" else f"{size} cells"
        times = lines.setdefault(f"{size}, {row['pass']}", {})
        times[names.get(row["system"], row["system"])] = row["median_ms"]
    systems = ("softmax", "linear", "ripple")
    cells = [[size, *(significant(times[key]) for key in systems)] for size, times in lines.items()]
    return with_sources(table(["milliseconds", *systems], cells), name)


@block("detection-speed-gpu")
def detection_speed_gpu() -> str:
    """Encoders and whole detectors on a GPU."""
    return _detection_speed(GPU_DETECTION)


@block("detection-speed-cpu")
def detection_speed_cpu() -> str:
    """Encoders on one core of a CPU."""
    return _detection_speed(CPU_DETECTION)


def _paper_top1(recipe: str | None) -> float | None:
    """The paper's top-1 of a CIFAR-100 recipe, without its prefix."""
    name = f"cifar100-{recipe}"
    accuracy = paper.ACCURACY.get(name)
    return accuracy[0] if accuracy else paper.TOP1_OF_TABLE_8.get(name)
