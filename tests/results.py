"""What tests of the documentation compare: committed results, and the pages that tell of them."""

import csv
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).parent.parent


def read_results(name):
    """The rows of a CSV under benchmarks/results."""
    return list(csv.DictReader((ROOT / "benchmarks/results" / name).open()))


def flowing(page):
    """The text of a page with its lines joined."""
    return " ".join((ROOT / page).read_text().split())


def top1_by_epoch(name):
    """What each evaluation of a run found, of its metrics under benchmarks/results."""
    rows = read_results(name)
    return {round(float(row["epoch"])): float(row["top1"]) for row in rows if row["top1"]}


def losses_by_epoch(name):
    """The mean training loss over the five epochs before each evaluation of a run."""
    steps = [(float(row["epoch"]), float(row["loss"])) for row in read_results(name) if row["loss"]]
    return {
        end: statistics.mean(x for epoch, x in steps if end - 5 < epoch <= end)
        for end in top1_by_epoch(name)
    }


def rounded(number, unit="0.1"):
    """Up from the half on, as a person rounds what a file prints."""
    return Decimal(str(number)).quantize(Decimal(unit), ROUND_HALF_UP)
