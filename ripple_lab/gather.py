"""Results of finished runs, gathered into one table."""

from pathlib import Path
from typing import Any

from ripple_lab.recipes import all_recipes
from ripple_lab.train.recipe import PLACES, Recipe, differences
from ripple_lab.train.results import read_result


def gather(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each run: its result, and how it departs from its recipe.

    Args:
        folders: Of finished runs.
    """
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, Any]:
    finished, written = folder / "result.json", folder / "recipe.json"
    if not finished.exists():
        state = "the run has not ended" if written.exists() else "it is no folder of a run"
        raise ValueError(f"a finished run has a result.json; {folder} has none: {state}")
    recipe = Recipe.read(written)
    known = all_recipes().get(recipe.name)
    aside = {"seed"} | PLACES  # has its own column; the place of the data changes nothing
    changes = ["not a recipe of this package"]
    if known:
        changes = differences(known.recipe, recipe, aside)
    row = read_result(finished)
    row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    return {
        "recipe": row.pop("recipe"),
        "changes": "; ".join(changes),
        **row,
        "precision": recipe.hardware.precision,
        "compiled": recipe.hardware.compile,
    }
