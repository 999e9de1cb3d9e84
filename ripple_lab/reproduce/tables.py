"""The paper's eight tables, row by row."""

from ripple_lab import paper
from ripple_lab.reproduce.queries import known
from ripple_lab.reproduce.table import Table, TableRow

YES, NO = "yes", "no"
RIPPLE = "cifar100-ripple-tiny"
SCHEDULE = "The paper: 300 epochs on 8 V100."
ACCURACY = ("top1", "top5")
PRECISION = ("ap", "ap_small", "ap_medium", "ap_large")


def numbers(table: int, recipe: str) -> dict[str, float]:
    """What a table of the paper says of a recipe's model, by column."""
    name, said = f"table {table}", dict(zip(ACCURACY, paper.ACCURACY.get(recipe, ()), strict=False))
    model = known()[recipe].recipe.model.name
    said |= dict(zip(PRECISION, paper.AVERAGE_PRECISION.get(recipe, ()), strict=False))
    said |= {
        column: found[key]
        for column, found, key in (
            ("top5", paper.TOP5_OF_TABLE_7, recipe),
            ("top1", paper.TOP1_OF_TABLE_8 if table == 8 else {}, recipe),
            ("speed", paper.SPEED.get(name, {}), recipe),
            ("parameters", paper.PARAMETERS.get(model, {}), name),
        )
        if key in found
    }
    if recipe.endswith("-no-ape"):
        said["parameters"] = paper.PARAMETERS_WITHOUT_POSITIONS[model]
    if model in paper.DETECTORS:
        said |= paper.DETECTORS[model]
        said["detector"] = said.pop("parameters")  # a column of fewer decimals
    return said


def rows(table: int, *lines: tuple[str, ...]) -> tuple[TableRow, ...]:
    """Rows of label, recipe, the system whose speed is theirs ("" for none), and facts."""
    return tuple(
        TableRow(label, numbers(table, recipe), tuple(facts), recipe, (system,) if system else ())
        for label, recipe, system, *facts in ((*line, "")[: max(3, len(line))] for line in lines)
    )


CIFAR = (
    ("DeiT-LA", "cifar100-deit-la-tiny"),
    ("DeiT", "cifar100-deit-tiny"),
    ("ConViT", "cifar100-convit-tiny"),
    ("ripple", RIPPLE),
)
SMCA = (("SMCA", "smca"), ("SMCA-LA", "smca-la"), ("SMCA-ripple", "smca-ripple"))
OPERATORS = {
    "softmax attention": ("softmax SDPA",),
    "ripple-softmax": ("softmax with ripples",),
    "linearized attention": ("linear attention",),
    "ripple (naïve)": ("ripple naive",),
    "ripple (DP)": ("ripple table triton", "ripple table"),
}
BOUNDED = {
    "ripple (DP), R_max 4": OPERATORS["ripple (DP)"],
    "ripple (tiled), R_max 4": ("ripple tiled triton", "ripple tiled"),
}

TABLES = (
    Table(
        "table1",
        "Table 1: ImageNet-1k",
        f"{SCHEDULE} All models have 6 heads, by its text and here. Its numbers of DeiT and ConViT "
        "equal those of the official tiny models, which have 3 and 4. `imagenet-convit4-tiny` is "
        "the recipe of ConViT's own.",
        ("parameters", *ACCURACY),
        rows(
            1,
            ("DeiT", "imagenet-deit-tiny"),
            ("ConViT", "imagenet-convit-tiny"),
            ("DeiT-LA", "imagenet-deit-la-tiny"),
            ("DeiT-LA + SineSPE", "imagenet-deit-la-sinespe-tiny"),
            ("DeiT-LA + ConvSPE", "imagenet-deit-la-convspe-tiny"),
            ("DeiT-LA + RoPE", "imagenet-deit-la-rope-tiny"),
            ("PermuteFormer", "imagenet-permuteformer-tiny"),
            ("ripple", "imagenet-ripple-tiny"),
        ),
    ),
    Table(
        "table2",
        "Table 2: CIFAR-100, with and without position embeddings",
        SCHEDULE,
        ("parameters", *ACCURACY),
        rows(
            2,
            *CIFAR,
            *((f"{label}, no position embeddings", f"{recipe}-no-ape") for label, recipe in CIFAR),
        ),
    ),
    Table(
        "table3",
        "Table 3: object detection on COCO",
        "The paper: 50 and 108 epochs on 8 V100, 16 images at a time. It does not say on what, nor "
        "at what size of image, the seconds were measured; our multiply-adds are of 800×1066 "
        "pixels. Parameters are those that are trained: one φ and one P for all heads of a layer. "
        "The paper's linear and ripple detectors have about as many more as one for each head "
        "would add.",
        ("detector", "gflops", "seconds", *PRECISION),
        rows(
            3,
            *(
                (f"{label}, {epochs} epochs", f"coco-{name}-{epochs}",
                 f"{name.replace('-', '_')}_resnet50")
                for epochs in (50, 108)
                for label, name in SMCA
            ),
        ),
        drawn=("ap",),
    ),
    Table(
        "table4",
        "Table 4: setups of the rippling process, CIFAR-100",
        f"{SCHEDULE} Speed: forward, batch 64, 16×16 tokens; the paper does not name the machine.",
        ("speed", *ACCURACY),
        rows(
            4,
            ("ripple", f"{RIPPLE}-r2", "ripple, R_max 2", YES, YES, "2"),
            ("ripple", RIPPLE, "ripple, R_max 4", YES, YES, "4"),
            ("ripple", f"{RIPPLE}-r8", "ripple, R_max 8", YES, YES, "8"),
            ("ripple", f"{RIPPLE}-r16", "ripple, R_max 16", YES, YES, "16"),
            ("fixed", f"{RIPPLE}-fixed", "ripple, fixed", YES, YES, "4"),
            ("logarithmic", f"{RIPPLE}-logarithmic", "ripple, logarithmic", YES, YES, "–"),
            ("truncated", f"{RIPPLE}-truncated", "ripple, truncated", YES, NO, "4"),
            ("softmax weights", f"{RIPPLE}-softmax", "ripple, softmax weights", NO, YES, "4"),
            ("DeiT-LA", "cifar100-deit-la-tiny", "DeiT-LA", NO, YES, "–"),
        ),
        facts=("local", "global", "R_max"),
        drawn=("speed", "top1"),
        tokens=16 * 16,
    ),
    Table(
        "table5",
        "Table 5: complexity",
        "The power of T = H·W tokens by which time and memory grow, a straight line through the "
        "logarithms, from 1,024 tokens on. The paper's is of time, with R growing with the side of "
        "the grid; with R_max at 4 the power is 1. Our naïve ripple and ripple-softmax meet all "
        "pairs, whatever R. Softmax attention is PyTorch's fused one, whose memory is linear.",
        ("both", "forward", "memory"),
        (
            *(
                TableRow(name, {"both": power}, (cost,), "", OPERATORS[name], name == "ripple (DP)")
                for name, (cost, power) in paper.COMPLEXITY.items()
            ),
            *(TableRow(name, {}, ("not in the paper",), "", it) for name, it in BOUNDED.items()),
        ),
        subject="attention",
        facts=("time, paper",),
        drawn=("both",),
    ),
    Table(
        "table6",
        "Table 6: feature maps, DeiT-LA on ImageNet-1k",
        f"{SCHEDULE} DPFP did not fully converge in the paper. The paper's own map without "
        "the fully connected layer is T2R. Our RFA is without its authors' learned σ.",
        ("top1",),
        rows(
            6,
            ("RFA", "imagenet-deit-la-tiny-rfa", "", NO),
            ("Performer", "imagenet-deit-la-tiny-performer", "", NO),
            ("DPFP", "imagenet-deit-la-tiny-dpfp", "", YES),
            (
                "T2R; the paper's without its fully connected layer",
                "imagenet-deit-la-tiny-t2r", "", YES,
            ),
            ("the paper's", "imagenet-deit-la-tiny", "", YES),
            ("the paper's, W₁ drawn anew each step", "imagenet-deit-la-tiny-random-w1", "", NO),
        ),
        subject="feature map",
        facts=("deterministic",),
    ),
    Table(
        "table7",
        "Table 7: number of ripple layers, ImageNet-1k",
        f"{SCHEDULE} Speed: forward, batch 64, 14×14 tokens, the paper's on one V100.",
        ("speed", *ACCURACY),
        rows(
            7,
            ("0", "imagenet-deit-la-tiny", "DeiT-LA"),
            ("3", "imagenet-ripple-tiny-layers-3", "ripple, 3 layers"),
            ("6", "imagenet-ripple-tiny-layers-6", "ripple, 6 layers"),
            ("9", "imagenet-ripple-tiny", "ripple, R_max 4"),
            ("12", "imagenet-ripple-tiny-layers-12", "ripple, 12 layers"),
        ),
        subject="ripple layers",
        tokens=14 * 14,
    ),
    Table(
        "table8",
        "Table 8: accuracy at the same speed, CIFAR-100",
        f"{SCHEDULE} Speed: the paper says neither batch nor machine; ours is forward, batch 64, "
        "16×16 tokens. For the two 12-layer models the paper gives other numbers here than in "
        "table 2.",
        ("parameters", "speed", "top1"),
        rows(
            8,
            ("DeiT-LA, 4 layers", "cifar100-deit-la-tiny4", "DeiT-LA of 4 layers"),
            ("DeiT-LA", "cifar100-deit-la-tiny", "DeiT-LA"),
            ("ripple, 4 layers", "cifar100-ripple-tiny4", "ripple of 4 layers"),
            ("ripple", RIPPLE, "ripple, R_max 4"),
        ),
        drawn=("speed", "top1"),
        tokens=16 * 16,
    ),
)  # fmt: skip
