"""The page of claims: what the paper says on speed, memory and accuracy, and what came of it here.

A verdict is computed from the same numbers as the row that it stands in.
"""

import math
from dataclasses import dataclass

from ripple_lab import paper
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.page_blocks import (
    FOUR_LAYERS,
    LONG,
    NO_POSITIONS,
    SHORT,
    difference,
    find,
    rows_of,
    significant,
    table,
    top1,
    with_sources,
)

OPERATORS = "op-width-96-batch-4.csv"
DENSE = tuple(f"op-width-96-batch-4-dense-{side}.csv" for side in (32, 64, 128))
WEIGHTS = "model-table4-side-16.csv"
FIGURE = "model-width-96-batch-4.csv"
FOUR_LAYERS_SPEED = "model-table8-side-16.csv"
DETECTION = "detection-nvidia-h200-bfloat16.csv"
NOISE = 1.0  # points of top-1: differences below it are no evidence
TOKENS = 16_384
RIPPLE, DEIT, LINEAR = "ripple, R_max 4", "DeiT, softmax SDPA", "DeiT-LA"
TABLES = "ripple, tables in PyTorch operations"
PAIRS = "ripple, all pairs in PyTorch operations"
LOGARITHMIC, DENSE_RINGS = "ripple, logarithmic", "ripple, dense"
HEADINGS = ("the paper says", "its numbers", "ours", "verdict")
VERDICTS = {True: "confirmed", False: "**not confirmed**", None: "not run"}


@dataclass(frozen=True)
class Claim:
    """One claim, what the paper has for it, what we have, and whether that confirms it."""

    text: str
    paper: str
    ours: str = "–"
    holds: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        return self.text, self.paper, self.ours, VERDICTS[self.holds]


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


def times(number: float) -> str:
    """A ratio."""
    return f"{significant(number)} ×"


@block("claims-speed")
def claims_speed() -> str:
    """Claims on speed."""
    tables, pairs, ripple, deit = (model(name) for name in (TABLES, PAIRS, RIPPLE, DEIT))
    linear, logarithmic, dense = (model(name) for name in (LINEAR, LOGARITHMIC, DENSE_RINGS))
    speeds = {row["system"]: row["images_per_second"] for row in rows_of(WEIGHTS)}
    four = find(rows_of(FOUR_LAYERS_SPEED), system="ripple of 4 layers")
    assert four
    four_layers = four["images_per_second"] / speeds[LINEAR]
    growth = _exponent(
        [(row["tokens"], row["median_ms"]) for row in rows_of(*DENSE)
         if row["system"] == "ripple table triton" and row["pass"] == "forward"]
    )  # fmt: skip
    linear_growth = _exponent([(t, operator("ripple tiled triton", t)) for t in (4096, TOKENS)])
    small = speeds[LOGARITHMIC] / speeds[RIPPLE]
    step = "forward+backward"
    autograd = [operator("ripple table by autograd", t, step=step) for t in (4096, TOKENS)]
    detector = {row["system"]: row["median_ms"] for row in rows_of(DETECTION)}
    softmax_detector, ripple_detector = detector["smca_resnet50"], detector["smca_ripple_resnet50"]
    theirs = paper.SPEED["table 4"]
    reaches = {2: "-r2", 4: "", 8: "-r8", 16: "-r16"}
    claims = [
        Claim(
            "Its algorithm, summed-area tables, is much faster than all pairs.",
            "figure",
            f"{significant(tables)} ms against {significant(pairs)}",
            tables < pairs,
        ),
        Claim(
            "Ripple attention is 5 to 10 times as fast as softmax when there are many tokens.",
            "figure",
            f"{times(deit / ripple)} with our kernels; {times(deit / tables)} with tables in "
            "PyTorch operations",
            deit / ripple >= 5,
        ),
        Claim(
            "It takes linear time and behaves like linear attention.",
            "figure",
            f"{significant(ripple)} ms against {significant(linear)}; time grows as "
            f"tokens^{linear_growth:.1f}",
            linear_growth <= 1.1 and ripple < 1.5 * linear,
        ),
        Claim(
            "If rings reach across the grid, time grows as tokens^1.5.",
            "O(HWR)",
            f"tokens^{growth:.2f} (tables as kernels)",
            growth <= 1.6,
        ),
        Claim(
            "Logarithmic rings are as fast as R_max 4.",
            "figure",
            f"{times(logarithmic / ripple)} the time; on 256 tokens {times(1 / small)}",
            logarithmic <= 1.1 * ripple,
        ),
        Claim(
            "Logarithmic rings are faster than dense ones when there are many tokens.",
            "figure",
            f"{significant(logarithmic)} ms against {significant(dense)}; in a training step "
            f"{significant(model(LOGARITHMIC, 'training step'))} against "
            f"{significant(model(DENSE_RINGS, 'training step'))}",
            logarithmic < dense
            and model(LOGARITHMIC, "training step") < model(DENSE_RINGS, "training step"),
        ),
        Claim(
            "On CIFAR-100's grid, ripple attention has a third of linear attention's speed.",
            f"{theirs['cifar100-ripple-tiny']:,.0f} against {theirs['cifar100-deit-la-tiny']:,.0f} "
            "images/s",
            f"{speeds[RIPPLE]:,.0f} against {speeds[LINEAR]:,.0f}",
            speeds[RIPPLE] < speeds[LINEAR] / 3,
        ),
        Claim(
            "A larger R_max is slower (2, 4, 8, 16).",
            ", ".join(f"{theirs[f'cifar100-ripple-tiny{end}']:,.0f}" for end in reaches.values())
            + " images/s",
            ", ".join(f"{speeds[f'ripple, R_max {reach}']:,.0f}" for reach in reaches),
            speeds["ripple, R_max 16"] < speeds["ripple, R_max 2"],
        ),
        Claim(
            "Four layers of ripple run about as fast as twelve of DeiT-LA.",
            times(paper.SPEED["table 8"]["cifar100-ripple-tiny4"]
                  / paper.SPEED["table 8"]["cifar100-deit-la-tiny"]) + " its speed",
            f"{times(four_layers)} its speed",
            four_layers >= 0.9,
        ),
        Claim(
            "Autograd through tables takes quadratic time, so a backward pass of one's own is "
            "needed.",
            "O(T²)",
            f"four times the tokens take {times(autograd[1] / autograd[0])} the time, as linear "
            "growth does",
            autograd[1] / autograd[0] > 8,
        ),
        Claim(
            "A detector with ripple attention takes little longer than one with softmax.",
            f"{1e3 * paper.DETECTORS['smca_ripple_resnet50']['seconds']:.0f} ms against "
            f"{1e3 * paper.DETECTORS['smca_resnet50']['seconds']:.0f}",
            f"{significant(ripple_detector)} ms against {significant(softmax_detector)}",
            ripple_detector < 1.2 * softmax_detector,
        ),
        Claim("Halting at τ makes an algorithm stop early.", "–", "none of ours does"),
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
    growth = _exponent(
        [(t, operator("ripple tiled triton", t, "peak_mb")) for t in (4096, TOKENS)]
    )
    claims = [
        Claim(
            "Memory grows linearly with the tokens.",
            "O(HW)",
            f"tokens^{growth:.1f}",
            growth <= 1.1,
        ),
        Claim(
            "Ripple attention needs 5 to 10 times less memory than softmax when there are many "
            "tokens.",
            "figure",
            f"{significant(ripple)} MB against {significant(deit)}: softmax kernels keep no "
            "pairs today",
            ripple <= deit / 5,
        ),
        Claim(
            "It needs much less memory than all pairs.",
            "figure",
            f"{significant(ripple)} MB against {significant(pairs)}",
            ripple < pairs / 5,
        ),
        Claim(
            "Memory is constant in the reach: R_max 4, logarithmic and dense rings need the same.",
            "figure",
            f"{significant(ripple)}, {significant(logarithmic)} and {significant(dense)} MB; in "
            "a training step "
            + ", ".join(
                significant(model(name, "training step", "peak_mb"))
                for name in (RIPPLE, LOGARITHMIC, DENSE_RINGS)
            ),
            max(logarithmic, dense) < 1.1 * ripple,
        ),
        Claim(
            "Autograd through tables takes quadratic memory.",
            "O(T²)",
            f"four times the tokens take {times(autograd[1] / autograd[0])} the memory",
            autograd[1] / autograd[0] > 8,
        ),
    ]
    return with_sources(_rows(claims), FIGURE, OPERATORS)


@block("claims-accuracy")
def claims_accuracy() -> str:
    """Claims on accuracy, in points of top-1 and of average precision."""

    def lead(text: str, one: str, other: str, file: str = SHORT, prefix: str = "cifar100-short-",
             close: bool = False) -> Claim:  # fmt: skip
        """That one is above the other, or with `close` at most a little below it."""
        theirs = difference(_theirs(f"cifar100-{one}"), _theirs(f"cifar100-{other}"))
        mine, its = top1(file, f"{prefix}{one}"), top1(file, f"{prefix}{other}")
        if mine is None or its is None:
            return Claim(text, theirs)
        points = mine - its
        ours = difference(mine, its)
        small = not close and abs(points) < NOISE
        return Claim(
            text,
            theirs,
            ours + (" (noise)" if small else ""),
            points > -NOISE if close else points >= NOISE,
        )

    imagenet = {
        name: paper.ACCURACY[f"imagenet-{name}-tiny"][0]
        for name in ("ripple", "deit", "deit-la", "convit")
    }
    average = {
        name: paper.AVERAGE_PRECISION[f"coco-{name}-50"]
        for name in ("smca", "smca-la", "smca-ripple")
    }
    maps = ("t2r", "rfa", "performer", "dpfp")
    best = max(paper.ACCURACY[f"imagenet-deit-la-tiny-{name}"][0] for name in maps)
    layers = paper.ACCURACY["imagenet-ripple-tiny-layers-12"][0]
    claims = [
        lead("300 epochs: ripple is above DeiT.", "ripple-tiny", "deit-tiny", LONG, "cifar100-"),
        lead("Ripple is above DeiT-LA.", "ripple-tiny", "deit-la-tiny"),
        lead("Ripple is about as good as ConViT.", "ripple-tiny", "convit-tiny", close=True),
        lead("Without position embeddings ripple is far above DeiT.", "ripple-tiny-no-ape",
             "deit-tiny-no-ape", NO_POSITIONS, "cifar100-"),
        lead("Without position embeddings it is about as good as ConViT.", "ripple-tiny-no-ape",
             "convit-tiny-no-ape", NO_POSITIONS, "cifar100-", close=True),
        lead("R_max 4 is better than 2.", "ripple-tiny", "ripple-tiny-r2"),
        lead("R_max 4 is better than 8.", "ripple-tiny", "ripple-tiny-r8"),
        lead("R_max 4 is better than 16.", "ripple-tiny", "ripple-tiny-r16"),
        lead("Learned weights are better than fixed ones.", "ripple-tiny", "ripple-tiny-fixed"),
        lead("Fixed weights are better than none (DeiT-LA).", "ripple-tiny-fixed", "deit-la-tiny"),
        lead("Stick-breaking is better than softmax weights.", "ripple-tiny",
             "ripple-tiny-softmax"),
        lead("What lies beyond R_max helps: ripple is above truncated ripple.", "ripple-tiny",
             "ripple-tiny-truncated"),
        lead("Logarithmic rings are clearly worse.", "ripple-tiny", "ripple-tiny-logarithmic"),
        lead("Four layers of ripple are better than twelve of DeiT-LA.", "ripple-tiny4",
             "deit-la-tiny"),
        Claim("ImageNet: ripple is above DeiT.", difference(imagenet["ripple"], imagenet["deit"])),
        Claim("ImageNet: it is above DeiT-LA.",
              difference(imagenet["ripple"], imagenet["deit-la"])),
        Claim("ImageNet: it is about as good as ConViT.",
              difference(imagenet["ripple"], imagenet["convit"])),
        Claim("ImageNet: the learned feature map is better than the best other one.",
              difference(imagenet["deit-la"], best)),
        Claim("ImageNet: nine layers of ripple are better than twelve.",
              difference(imagenet["ripple"], layers)),
        Claim("COCO, 50 epochs, AP: SMCA-ripple is above SMCA-LA.",
              difference(average["smca-ripple"][0], average["smca-la"][0])),
        Claim("COCO, 50 epochs, AP: it almost reaches SMCA.",
              difference(average["smca-ripple"][0], average["smca"][0])),
        Claim("COCO, 50 epochs, AP of small objects: it is above SMCA.",
              difference(average["smca-ripple"][1], average["smca"][1])),
        Claim("Results do not depend on τ.", "–"),
    ]  # fmt: skip
    return with_sources(_rows(claims), LONG, SHORT, NO_POSITIONS, FOUR_LAYERS)


def _rows(claims: list[Claim]) -> str:
    return table(HEADINGS, [claim.cells for claim in claims])


def _theirs(recipe: str) -> float:
    """The paper's top-1."""
    accuracy = paper.ACCURACY.get(recipe)
    return accuracy[0] if accuracy else paper.TOP1_OF_TABLE_8[recipe]


def _exponent(points: list[tuple[int, float]]) -> float:
    """k of the power law c·Tᵏ through the first and the last point."""
    points = sorted(points)
    (few, fast), (many, slow) = points[0], points[-1]
    return math.log(slow / fast) / math.log(many / few)
