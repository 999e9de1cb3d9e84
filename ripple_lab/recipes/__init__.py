"""Recipes: a file for each result, named after its path: `cifar100/ripple_tiny.py` is
`cifar100-ripple-tiny`. A folder's `__init__` holds what its results share."""

import importlib
import pkgutil
from dataclasses import dataclass, replace
from functools import cache

from ripple_lab.console import did_you_mean
from ripple_lab.train.recipe import Recipe


@dataclass(frozen=True)
class Listed:
    """A recipe, with what its file says of it."""

    recipe: Recipe
    text: str

    @property
    def claim(self) -> str:
        """Which result it makes."""
        return self.text.splitlines()[0]


@cache
def all_recipes() -> dict[str, Listed]:
    """Every recipe by its name."""
    found = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not module.ispkg:
            name = module.name.removeprefix(f"{__name__}.").replace(".", "-").replace("_", "-")
            loaded = importlib.import_module(module.name)
            found[name] = Listed(replace(loaded.RECIPE, name=name), str(loaded.__doc__))
    return found


def find_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    known = all_recipes()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"there is no recipe {name!r}: {hint}`ripple train --list` shows all")
    return known[name].recipe
