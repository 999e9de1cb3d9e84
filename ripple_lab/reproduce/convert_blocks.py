"""Pretrained models that were turned into ripples, for the page Swap it into your model."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.results import read_csv, results_folder

HEADINGS = {
    "max_distance": "near softmax, R",
    "aligned_by": "aligned by",
    "photos": "measured on photos",
    "blocks.5.attn": "error of block 5",
    "blocks.7.attn": "7",
    "blocks.9.attn": "9",
    "masks_alike": "masks alike",
    "iou": "IoU with trimaps",
    "iou_unchanged": "unchanged model's",
    "embedding_error": "error of the embedding",
}


@block("sam2-masks")
def sam2_masks() -> str:
    """A row for each aligned encoder."""
    parts = []
    for path in sorted(results_folder().glob("sam2-masks-*.csv")):
        lines = ["| " + " | ".join(HEADINGS.values()) + " |", "|" + "---|" * len(HEADINGS)]
        for row in read_csv(path):
            cells = (row[name] for name in HEADINGS)
            text = [f"{x:.3f}" if isinstance(x, float) else str(x) for x in cells]
            lines.append("| " + " | ".join(text) + " |")
        lines.append(f"\nFrom `benchmarks/results/{path.name}`.")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "Not yet run."
