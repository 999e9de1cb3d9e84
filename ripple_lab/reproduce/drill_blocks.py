"""What the drills found, for the page Reliability."""

from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import markdown_table
from ripple_lab.results import read_csv, results_folder

HEADINGS = ("what happens", "what must be so", "trials", "held")


@block("drills")
def drills() -> str:
    """A row for each drill: how often it was tried, and how often all was as it must be."""
    parts = []
    for path in sorted(results_folder().glob("drills-*.csv")):
        rows, lines = read_csv(path), []
        for name in dict.fromkeys(row["drill"] for row in rows):
            own = [row for row in rows if row["drill"] == name]
            trials, held = (sum(row[column] for row in own) for column in ("trials", "held"))
            lines.append((name, own[0]["shows"], str(trials), str(held)))
        parts.append(markdown_table(HEADINGS, lines, words=2))
        parts.append(f"Each case of each drill is in `benchmarks/results/{path.name}`.")
    return "\n\n".join(parts) or "Not yet run."
