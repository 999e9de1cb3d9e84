"""What a finished run wrote of its result."""

import json
from pathlib import Path
from typing import Any


def read_result(path: Path) -> dict[str, Any]:
    """What a finished run wrote into its `result.json`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        reason = "" if isinstance(result, dict) and "recipe" in result else "it has no recipe"
    except ValueError as error:  # neither JSON nor, perhaps, text
        reason = str(error)
    if reason:
        folder = path.parent
        raise ValueError(
            f"a result is a JSON object that names its recipe; {path} is not ({reason}): remove "
            f"it, and `ripple train {folder / 'recipe.json'} --output {folder} --resume` makes it "
            "anew"
        )
    return result
