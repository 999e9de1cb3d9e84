"""The page of claims: what the paper says on speed, memory and accuracy, and what we measured.

A verdict is computed from the same numbers as the row that it stands in.
"""

from collections.abc import Sequence

from ripple_lab import paper
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, short
from ripple_lab.reproduce.page_blocks import find, rows_of, with_sources
from ripple_lab.reproduce.speeds import exponent

OPERATORS = "op-width-96-batch-4.csv"
DENSE = tuple(f"op-width-96-batch-4-dense-{side}.csv" for side in (32, 64, 128))
WEIGHTS = "model-table4-side-16.csv"
FIGURE = "model-width-96-batch-4.csv"
FOUR_LAYERS_SPEED = "model-table8-side-16.csv"
DETECTION = "detection-nvidia-h200-bfloat16.csv"
TOKENS = 16_384
RIPPLE, DEIT, LINEAR = "ripple, R_max 4", "DeiT, softmax SDPA", "DeiT-LA"
TABLES = "ripple, tables in PyTorch operations"
PAIRS = "ripple, all pairs in PyTorch operations"
LOGARITHMIC, DENSE_RINGS = "ripple, logarithmic", "ripple, dense"
HEADINGS = ("the paper says", "its numbers", "ours", "verdict")
VERDICTS = {True: "confirmed", False: "**not confirmed**", None: "not run"}


def model(system: str, step: str = "forward", value: str = "median_ms") -> float:
    """Of a whole model in the setting of the paper's figure, with the most tokens."""
    row = find(rows_of(FIGURE), system=system, tokens=TOKENS, **{"pass": step})
    assert row, f"{FIGURE} has no {system}"
    return float(row[value])


def operator(system: str, tokens: int, value: str = "median_ms", step: str = "forward") -> float:
    """Of the operator alone, in the same setting."""
    row = find(rows_of(OPERATORS, *DENSE), system=system, tokens=tokens, **{"pass": step})
    assert row, f"{OPERATORS} has no {system}"
    return float(row[value])


def power(points: list[tuple[int, float]]) -> float:
    """k of the power law c·Tᵏ through these points."""
    found = exponent(sorted(points))
    assert found is not None, "a power law needs two points"
    return found


def times(number: float) -> str:
    """A ratio."""
    return f"{short(number)} ×"


@block("claims-speed")
def claims_speed() -> str:
    """Claims on speed."""
    tables, pairs, ripple, deit = (model(name) for name in (TABLES, PAIRS, RIPPLE, DEIT))
    linear, logarithmic, dense = (model(name) for name in (LINEAR, LOGARITHMIC, DENSE_RINGS))
    speeds = {row["system"]: row["images_per_second"] for row in rows_of(WEIGHTS)}
    four = find(rows_of(FOUR_LAYERS_SPEED), system="ripple of 4 layers")
    assert four
    four_layers = four["images_per_second"] / speeds[LINEAR]
    growth = power(
        [(row["tokens"], row["median_ms"]) for row in rows_of(*DENSE)
         if row["system"] == "ripple table triton" and row["pass"] == "forward"]
    )  # fmt: skip
    linear_growth = power([(t, operator("ripple tiled triton", t)) for t in (4096, TOKENS)])
    small = speeds[LOGARITHMIC] / speeds[RIPPLE]
    step = "forward+backward"
    autograd = [operator("ripple table by autograd", t, step=step) for t in (4096, TOKENS)]
    detector = {row["system"]: row["median_ms"] for row in rows_of(DETECTION)}
    softmax_detector, ripple_detector = detector["smca_resnet50"], detector["smca_ripple_resnet50"]
    theirs = paper.SPEED["table 4"]
    reaches = {2: "-r2", 4: "", 8: "-r8", 16: "-r16"}
    claims = [
        (
            "Its algorithm, summed-area tables, is much faster than all pairs.",
            "figure",
            f"{short(tables)} ms against {short(pairs)}",
            tables < pairs,
        ),
        (
            "Ripple attention is 5 to 10 times as fast as softmax when there are many tokens.",
            "figure",
            f"{times(deit / ripple)} with our kernels; {times(deit / tables)} with tables in "
            "PyTorch operations",
            deit / ripple >= 5,
        ),
        (
            "It takes linear time and behaves like linear attention.",
            "figure",
            f"{short(ripple)} ms against {short(linear)}; time grows as "
            f"tokens^{linear_growth:.1f}",
            linear_growth <= 1.1 and ripple < 1.5 * linear,
        ),
        (
            "If rings reach across the grid, time grows as tokens^1.5.",
            "O(HWR)",
            f"tokens^{growth:.2f} (tables as kernels)",
            growth <= 1.6,
        ),
        (
            "Logarithmic rings are as fast as R_max 4.",
            "figure",
            f"{times(logarithmic / ripple)} the time; on 256 tokens {times(1 / small)}",
            logarithmic <= 1.1 * ripple,
        ),
        (
            "Logarithmic rings are faster than dense ones when there are many tokens.",
            "figure",
            f"{short(logarithmic)} ms against {short(dense)}; in a training step "
            f"{short(model(LOGARITHMIC, 'training step'))} against "
            f"{short(model(DENSE_RINGS, 'training step'))}",
            logarithmic < dense
            and model(LOGARITHMIC, "training step") < model(DENSE_RINGS, "training step"),
        ),
        (
            "On CIFAR-100's grid, ripple attention has a third of linear attention's speed.",
            f"{theirs['cifar100-ripple-tiny']:,.0f} against {theirs['cifar100-deit-la-tiny']:,.0f} "
            "images/s",
            f"{speeds[RIPPLE]:,.0f} against {speeds[LINEAR]:,.0f}",
            speeds[RIPPLE] < speeds[LINEAR] / 3,
        ),
        (
            "A larger R_max is slower (2, 4, 8, 16).",
            ", ".join(f"{theirs[f'cifar100-ripple-tiny{end}']:,.0f}" for end in reaches.values())
            + " images/s",
            ", ".join(f"{speeds[f'ripple, R_max {reach}']:,.0f}" for reach in reaches),
            speeds["ripple, R_max 16"] < speeds["ripple, R_max 2"],
        ),
        (
            "Four layers of ripple run about as fast as twelve of DeiT-LA.",
            times(paper.SPEED["table 8"]["cifar100-ripple-tiny4"]
                  / paper.SPEED["table 8"]["cifar100-deit-la-tiny"]) + " its speed",
            f"{times(four_layers)} its speed",
            four_layers >= 0.9,
        ),
        (
            "Autograd through tables takes quadratic time, so a backward pass of one's own is "
            "needed.",
            "O(T²)",
            f"four times the tokens take {times(autograd[1] / autograd[0])} the time, as linear "
            "growth does",
            autograd[1] / autograd[0] > 8,
        ),
        (
            "A detector with ripple attention takes little longer than one with softmax.",
            f"{1e3 * paper.DETECTORS['smca_ripple_resnet50']['seconds']:.0f} ms against "
            f"{1e3 * paper.DETECTORS['smca_resnet50']['seconds']:.0f}",
            f"{short(ripple_detector)} ms against {short(softmax_detector)}",
            ripple_detector < 1.2 * softmax_detector,
        ),
        ("Halting at τ makes an algorithm stop early.", "–", "none of ours does", None),
    ]  # fmt: skip
    return with_sources(_rows(claims), FIGURE, OPERATORS, *DENSE, WEIGHTS, FOUR_LAYERS_SPEED,
                        DETECTION)  # fmt: skip


@block("claims-memory")
def claims_memory() -> str:
    """Claims on memory."""
    names = (RIPPLE, DEIT, PAIRS, LOGARITHMIC, DENSE_RINGS)
    ripple, deit, pairs, logarithmic, dense = (model(name, value="peak_mb") for name in names)
    step = "forward+backward"
    autograd = [operator("ripple table by autograd", t, "peak_mb", step) for t in (4096, TOKENS)]
    growth = power([(t, operator("ripple tiled triton", t, "peak_mb")) for t in (4096, TOKENS)])
    claims = [
        (
            "Memory grows linearly with the tokens.",
            "O(HW)",
            f"tokens^{growth:.1f}",
            growth <= 1.1,
        ),
        (
            "Ripple attention needs 5 to 10 times less memory than softmax when there are many "
            "tokens.",
            "figure",
            f"{short(ripple)} MB against {short(deit)}: softmax kernels keep no pairs today",
            ripple <= deit / 5,
        ),
        (
            "It needs much less memory than all pairs.",
            "figure",
            f"{short(ripple)} MB against {short(pairs)}",
            ripple < pairs / 5,
        ),
        (
            "Memory is constant in the reach: R_max 4, logarithmic and dense rings need the same.",
            "figure",
            f"{short(ripple)}, {short(logarithmic)} and {short(dense)} MB; in "
            "a training step "
            + ", ".join(
                short(model(name, "training step", "peak_mb"))
                for name in (RIPPLE, LOGARITHMIC, DENSE_RINGS)
            ),
            max(logarithmic, dense) < 1.1 * ripple,
        ),
        (
            "Autograd through tables takes quadratic memory.",
            "O(T²)",
            f"four times the tokens take {times(autograd[1] / autograd[0])} the memory",
            autograd[1] / autograd[0] > 8,
        ),
    ]
    return with_sources(_rows(claims), FIGURE, OPERATORS)


@block("claims-others")
def claims_others() -> str:
    """Claims on accuracy beyond CIFAR-100, in points of top-1 and of average precision."""
    top1 = {name.removeprefix("imagenet-"): numbers[0] for name, numbers in paper.ACCURACY.items()}
    ripple, linear = top1["ripple-tiny"], top1["deit-la-tiny"]
    maps = max(top1[f"deit-la-tiny-{name}"] for name in ("t2r", "rfa", "performer", "dpfp"))
    average = paper.AVERAGE_PRECISION
    ours, softmax = average["coco-smca-ripple-50"], average["coco-smca-50"]
    claims = [
        ("ImageNet: ripple is above DeiT", ripple - top1["deit-tiny"]),
        ("ImageNet: ripple is above DeiT-LA", ripple - linear),
        ("ImageNet: ripple is about as good as ConViT", ripple - top1["convit-tiny"]),
        ("ImageNet: the learned feature map is better than all others", linear - maps),
        ("ImageNet: nine layers of ripple are better than twelve",
         ripple - top1["ripple-tiny-layers-12"]),
        ("COCO, 50 epochs: SMCA-ripple is above SMCA-LA", ours[0] - average["coco-smca-la-50"][0]),
        ("COCO, 50 epochs: SMCA-ripple almost reaches SMCA", ours[0] - softmax[0]),
        ("COCO, 50 epochs, small objects: SMCA-ripple is above SMCA", ours[1] - softmax[1]),
    ]  # fmt: skip
    rows = [[text, f"{points:+.1f}".replace("-", "−"), VERDICTS[None]] for text, points in claims]
    rows.append(["The results do not depend on τ", "–", VERDICTS[None]])
    return markdown_table(("the paper says", "its difference", "verdict"), rows, words=3)


def _rows(claims: Sequence[tuple[str, str, str, bool | None]]) -> str:
    """A claim, what the paper has for it, what we have, and whether that confirms it."""
    rows = [(*said, VERDICTS[holds]) for *said, holds in claims]
    return markdown_table(HEADINGS, rows, words=len(HEADINGS))
