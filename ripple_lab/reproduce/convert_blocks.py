"""Blocks about pretrained models that were turned into ripples."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table, rounded
from ripple_lab.reproduce.page_blocks import rows_of, with_sources

SAM2 = "sam2-masks-amd-epyc-1-threads.csv"
FIGURES = {
    "blocks.5.attn": "error of block 5",
    "blocks.7.attn": "block 7",
    "blocks.9.attn": "block 9",
    "embedding_error": "of the embedding",
    "masks_alike": "masks alike",
    "iou": "IoU with trimaps",
    "iou_unchanged": "unchanged model's",
}


@block("sam2-masks")
def sam2_masks() -> str:
    """What is left of SAM 2's masks, for each reach of the near part."""
    rows = [
        [f"{row['near']}, R_max {row['max_distance']}", row["aligned_by"]]
        + [rounded(row[name], 3) for name in FIGURES]
        for row in rows_of(SAM2)
    ]
    headings = ("near by", "aligned by", *FIGURES.values())
    counts = {row["photos"] for row in rows_of(SAM2)}
    table = markdown_table(headings, rows, words=2)
    return with_sources(f"{table}\n\nMeans over {max(counts)} photos.", SAM2)
