"""Result files: every CSV of a folder, told apart by its columns and not by its name."""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FOLDER = Path("benchmarks/results")

# The columns by which a kind of file is known. The first kind that fits is it.
KINDS: dict[str, set[str]] = {
    "runs": {"recipe", "changes", "seed", "epochs", "hardware"},
    "metrics": {"kind", "step", "epoch", "loss"},
    "detectors": {"part", "hardware", "dtype", "batch", "system", "pass", "status", "median_ms"},
    "operators": {"head_dim", "max_distance", "hardware", "dtype", "batch", "heads", "tokens"}
    | {"system", "pass", "status", "median_ms", "peak_mb"},
    "models": {"images_per_second", "hardware", "dtype", "batch", "tokens", "system", "pass"}
    | {"status", "median_ms", "peak_mb"},
}
# The columns that are read as numbers; all others are text.
NUMBERS = {"seed", "epochs", "top1", "top5", "ap", "ap_small", "ap_medium", "ap_large"}
NUMBERS |= {"batch", "heads", "head_dim", "max_distance", "embed_dim", "tokens", "median_ms"}
NUMBERS |= {"peak_mb", "images_per_second", "step", "epoch", "jsd", "halting_group", "groups"}


@dataclass
class Results:
    """The rows of each kind; each row names its "file", relative to the folder."""

    runs: list[Row] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    detectors: list[Row] = field(default_factory=list)
    operators: list[Row] = field(default_factory=list)
    models: list[Row] = field(default_factory=list)


def read_results(folder: Path = FOLDER) -> Results:
    """Every result file under a folder; a run that two files hold counts once.

    Raises:
        ValueError: There is no such folder, or a number in a file is none.
    """
    if not folder.is_dir():
        raise ValueError(
            f"results are read from a folder of CSV files; there is no folder {folder}: run this "
            "in a checkout of the repository"
        )
    results, seen = Results(), set()
    for path in sorted(folder.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            kind = next((kind for kind, needed in KINDS.items() if needed <= columns), None)
            if kind is None:
                continue
            for number, raw in enumerate(reader, start=2):
                row = {name: _value(name, text, path, number) for name, text in raw.items()}
                if kind == "runs":
                    key = tuple(row.get(name) for name in sorted(KINDS["runs"] | {"top1", "ap"}))
                    if key in seen:
                        continue
                    seen.add(key)
                row["file"] = path.relative_to(folder).as_posix()
                getattr(results, kind).append(row)
    return results


def _value(column: str, text: str | None, path: Path, line: int) -> Any:
    """A cell: text, a number, or None where it is empty."""
    if column not in NUMBERS and not str(column).startswith("jsd/"):
        return text or ""
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError(
            f"the column {column} holds numbers; line {line} of {path} has {text!r} there"
        ) from None
    return int(number) if number.is_integer() else number
