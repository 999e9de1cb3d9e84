"""Committed result files: where they are, and their rows."""

import csv
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RUN_COLUMNS = {"recipe", "changes", "seed", "epochs", "hardware"}
RUN_NUMBERS = ("seed", "epochs", "top1", "top5", "ap", "ap_small", "ap_medium", "ap_large")


def results_folder() -> Path:
    """`benchmarks/results` of the checkout this package is in, else the copy inside the package."""
    package = Path(__file__).parent
    checkout = package.parent / "benchmarks" / "results"
    return checkout if checkout.is_dir() else package / "results_data"


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV: numbers as numbers, True and False as such, blanks as None."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def training_results(folder: Path | None = None) -> list[Row]:
    """Finished training runs, one row each, with the "file" they stand in.

    Rows are those of `ripple results`: "recipe", "changes" ("" for none), "seed", "epochs",
    "hardware" and the metrics ("top1" and "top5", or "ap" and its parts). A run that stands in two
    files counts once.

    Raises:
        ValueError: The folder does not exist, or a number in a file is not one.
    """
    folder = folder or results_folder()
    if not folder.is_dir():
        raise ValueError(f"results are CSV files in a folder; there is no folder {folder}")
    found: dict[tuple[Any, ...], Row] = {}
    for path in sorted(folder.glob("*.csv")):
        rows = read_csv(path)
        if not rows or not rows[0].keys() >= RUN_COLUMNS:
            continue
        for line, row in enumerate(rows, start=2):
            for name in RUN_NUMBERS:
                if isinstance(row.get(name), str):
                    raise ValueError(
                        f"the column {name} holds numbers; line {line} of {path} has "
                        f"{row[name]!r}: write the file again with `ripple results`"
                    )
            row["changes"] = row["changes"] or ""
            key = tuple(row.get(name) for name in sorted(RUN_COLUMNS | {"top1", "ap"}))
            found.setdefault(key, row | {"file": path.relative_to(folder).as_posix()})
    return list(found.values())


def _value(text: str | None) -> Any:
    """A cell as a number, a truth value, text, or None if blank."""
    if not text:
        return None
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
