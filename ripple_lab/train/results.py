"""What a finished run wrote of its result."""

from pathlib import Path
from typing import Any

from ripple_lab.files import parse_json


def read_result(path: Path) -> dict[str, Any]:
    """What a finished run wrote into its `result.json`."""
    try:
        result = parse_json(path.read_bytes())
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
