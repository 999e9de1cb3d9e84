"""Committed result files: where they are, and their rows."""

import csv
from functools import cache, cached_property
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# The columns by which a kind of file is known; the first kind that fits is it.
_TIMED = {"hardware", "dtype", "batch", "system", "pass", "status", "median_ms"}
KINDS: dict[str, set[str]] = {
    "runs": {"recipe", "changes", "seed", "epochs", "hardware"},
    "metrics": {"kind", "step", "epoch", "loss"},
    "layers": _TIMED | {"dim", "heads", "tokens", "peak_mb"},
    "detectors": _TIMED | {"part"},
    "rings": _TIMED | {"heads", "head_dim", "partition"},  # operators of other partitions
    "operators": _TIMED | {"heads", "head_dim", "max_distance", "tokens", "peak_mb"},
    "models": _TIMED | {"images_per_second", "tokens", "peak_mb"},
}
# Columns that may be empty but never hold a word.
NUMBERS = {"seed", "epochs", "top1", "top5", "ap", "ap_small", "ap_medium", "ap_large", "batch"}
NUMBERS |= {"heads", "head_dim", "max_distance", "tokens", "median_ms", "peak_mb", "step", "epoch"}
NUMBERS |= {"images_per_second", "jsd", "groups"}


def results_folder() -> Path:
    """`benchmarks/results` of the checkout this package is in, else the copy inside the package."""
    package = Path(__file__).parent
    checkout = package.parent / "benchmarks" / "results"
    return checkout if checkout.is_dir() else package / "results_data"


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV: numbers as numbers, True and False as such, blanks as None."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


class Results:
    """The result files of a folder. Each row names its "file", relative to the folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or results_folder()
        if not self.folder.is_dir():
            raise ValueError(f"results are CSV files in a folder; there is no folder {self.folder}")

    def file(self, name: str) -> list[Row]:
        """The rows of one file, none where there is no such file."""
        path = self.folder / name
        return [row | {"file": name} for row in read_csv(path)] if path.exists() else []

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of all files of a kind, a key of `KINDS`.

        Runs are the rows of `ripple results`: "recipe", "changes" ("" for none), "seed", "epochs",
        "hardware" and the metrics ("top1" and "top5", or "ap" and its parts). A run that stands in
        two files counts once.
        """
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for path in sorted(self.folder.rglob("*.csv")):
            rows = self.file(path.relative_to(self.folder).as_posix())
            columns = rows[0].keys() if rows else set()
            kind = next((kind for kind, needed in KINDS.items() if needed <= columns), "others")
            if kind != "others":
                _check(rows)
            found.setdefault(kind, []).extend(rows)
        if "runs" in found:
            found["runs"] = _each_once(found["runs"])
        return found


@cache
def committed_results() -> Results:
    """The files of `results_folder`, read once."""
    return Results()


def _check(rows: list[Row]) -> None:
    for line, row in enumerate(rows, start=2):
        for name in NUMBERS & row.keys():
            if isinstance(row[name], str):
                raise ValueError(
                    f"the column {name} holds numbers; line {line} of {row['file']} has "
                    f"{row[name]!r}: write the file again with the command that made it"
                )


def _each_once(runs: list[Row]) -> list[Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for run in runs:
        run["changes"] = run["changes"] or ""
        key = tuple(run.get(name) for name in sorted(KINDS["runs"] | {"top1", "ap"}))
        found.setdefault(key, run)
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
