"""Blocks about pretrained models that were turned into ripples."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded
from ripple_lab.reproduce.page_blocks import with_sources
from ripple_lab.results import read_csv, results_folder

VARIANTS = {
    "r8-far": "softmax to distance 8, then far rings",
    "r4-far": "softmax to distance 4, then far rings",
    "r8": "softmax to distance 8, then one sum",
    "r4": "softmax to distance 4, then one sum",
    "windows": "windows of 16×16",
    "hedgehog": "hedgehog features, R_max 4",
    "paper": "the paper's features, R_max 4",
}
FIGURES = {
    "blocks.5.attn": "error of block 5",
    "blocks.7.attn": "block 7",
    "blocks.9.attn": "block 9",
    "embedding_error": "of the embedding",
    "masks_alike": "masks alike",
    "iou": "IoU with trimaps",
    "iou_unchanged": "unchanged model's",
}


@block("sam2-align")
def sam2_align() -> str:
    """What is left of SAM 2's masks, for each way to turn its global blocks."""
    parts = []
    for path in sorted(results_folder().glob("sam2-align-*.csv")):
        rows = read_csv(path)
        lines = [
            [VARIANTS[row["variant"]], aligned_by(row)]
            + [rounded(row[name], 3) for name in FIGURES]
            for row in sorted(rows, key=lambda row: [*VARIANTS].index(row["variant"]))
        ]
        headings = ("attention of the three blocks", "aligned by", *FIGURES.values())
        table = markdown_table(headings, lines, words=2)
        text = f"{table}\n\n{rows[0]['hardware']}; means over {rows[0]['photos']} photos."
        parts.append(with_sources(text, path.name))
    return "\n\n".join(parts) or "Not yet run."


def aligned_by(row: dict[str, object]) -> str:
    """Steps for new parameters, with projections, and end to end."""
    steps = " + ".join(str(row[name]) for name in ("steps", "block_steps", "feature_steps"))
    return f"{steps} steps of {row['batch']} on {row['photos_learned']} photos"
