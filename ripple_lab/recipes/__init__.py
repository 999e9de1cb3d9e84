"""Recipes by name: a module a data set, a base and then a line a variant.

What a run of a recipe reached is in result files; `ripple train --list` shows it.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ripple_lab.console import did_you_mean

if TYPE_CHECKING:
    from ripple_lab.train.recipe import Recipe

DATA_SETS = ("cifar100", "imagenet", "digits", "coco", "shapes")  # a name begins with one of them


@dataclass(frozen=True)
class Listed:
    """A recipe, what of the paper or of ours it shows, and what its command needs."""

    recipe: Any
    shows: str
    options: str = ""

    @property
    def command(self) -> str:
        """What trains it."""
        return f"ripple train {self.recipe.name} {self.options}".rstrip()


@cache
def recipes_of(data_set: str) -> dict[str, Listed]:
    """The recipes of one data set; no other module is imported."""
    table: dict[str, Listed] = importlib.import_module(f"{__name__}.{data_set}").RECIPES
    return table


def all_recipes() -> dict[str, Listed]:
    """Every recipe by its name."""
    return {name: listed for data_set in DATA_SETS for name, listed in recipes_of(data_set).items()}


def find_recipe(name: str) -> "Recipe":
    """The recipe of that name."""
    data_set = name.split("-")[0]
    known = recipes_of(data_set) if data_set in DATA_SETS else {}
    if name not in known:
        hint = did_you_mean(name, all_recipes())
        raise ValueError(f"there is no recipe {name!r}: {hint}`ripple train --list` shows all")
    return known[name].recipe
