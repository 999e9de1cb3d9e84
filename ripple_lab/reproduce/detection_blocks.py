"""Blocks of the page on detection."""

from ripple_lab import paper
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.reproduce.page_blocks import rows_of, with_sources
from ripple_lab.reproduce.queries import known
from ripple_lab.reproduce.table_columns import network

GPU_DETECTION = "detection-nvidia-h200-bfloat16.csv"
CPU_DETECTION = "detection-amd-epyc-1-threads-float32.csv"
SHAPES = "shapes-{}-amd-epyc-1-threads.csv"


@block("detector-costs")
def detector_costs() -> str:
    """Trained parameters and multiply-adds, ours and the paper's."""
    attentions = {"smca": "softmax", "smca-la": "linear", "smca-ripple": "ripple"}
    lines = []
    for name, attention in attentions.items():
        recipe, model = f"coco-{name}-50", f"{name.replace('-', '_')}_resnet50"
        ours, theirs = network(recipe), paper.DETECTORS[model]
        others = known()[recipe].recipe.model.heads - 1
        for_each_head = ours["millions"] + others * ours["phi_and_p"]
        sizes = [rounded(ours["millions"], 2), rounded(for_each_head, 2)]
        work = [f"{rounded(it['gflops'], 0)} G" for it in (ours, theirs)]
        lines.append([f"`{model}`", attention, *sizes, rounded(theirs["parameters"], 1), *work])
    headings = ["name", "attention in the encoder", "M parameters", "with φ and P for each head"]
    headings += ["the paper's", "multiply-adds, 800×1066", "the paper's"]
    return markdown_table(headings, lines, words=2)


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
    return with_sources(markdown_table(["encoder", "AP", "AP50", "AP75"], lines), *files.values())


def _detection_speed(name: str) -> str:
    """One row a grid and pass, one column a system, in milliseconds."""
    names = {"smca_resnet50": "softmax", "smca_la_resnet50": "linear"}
    names["smca_ripple_resnet50"] = "ripple"
    lines: dict[str, dict[str | None, float]] = {}
    for row in rows_of(name):
        size = f"{row['height']}×{row['width']}"
        size = f"whole detector, {size} pixels" if row["part"] == "detector" else f"{size} cells"
        times = lines.setdefault(f"{size}, {row['pass']}", {})
        times[names.get(row["system"], row["system"])] = row["median_ms"]
    systems = ("softmax", "linear", "ripple")
    cells = [[size, *(short(times[key]) for key in systems)] for size, times in lines.items()]
    return with_sources(markdown_table(["milliseconds", *systems], cells), name)


@block("detection-speed-gpu")
def detection_speed_gpu() -> str:
    """Encoders and whole detectors on a GPU."""
    return _detection_speed(GPU_DETECTION)


@block("detection-speed-cpu")
def detection_speed_cpu() -> str:
    """Encoders on one core of a CPU."""
    return _detection_speed(CPU_DETECTION)
