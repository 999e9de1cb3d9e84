"""Results of finished runs, gathered into one table."""

import json
from pathlib import Path
from typing import Any

from ripple_attention.recipes import all_recipes
from ripple_attention.train.recipe import Recipe, differences


def gather(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each run: its result, and where it left its recipe.

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
    ignored = ("seed", "data.root")  # a column of its own; where the data lie decides nothing
    changes = differences(known.recipe, recipe) if known else ["not a recipe of this package"]
    row = json.loads(finished.read_text(encoding="utf-8"))
    row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    return {
        "recipe": row.pop("recipe"),
        "changes": "; ".join(c for c in changes if c.split(":")[0] not in ignored),
        **row,
        "precision": recipe.hardware.precision,
        "compiled": recipe.hardware.compile,
    }
