"""Training runs as numbers of a table: which run a row shows, and where it left the paper."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ripple_lab.recipes import all_recipes
from ripple_lab.reproduce.found import Results, Row
from ripple_lab.reproduce.values import Measured, Missing, Value
from ripple_lab.train.recipe import MAY_CHANGE, Recipe, differences

# Fields that do not change what is learned, or only where and when it is looked at.
HARMLESS = MAY_CHANGE | {"name", "seed", "ema_decay", "data.source", "data.in_memory"}


def training_command(recipe: str) -> str:
    """What trains a recipe."""
    return all_recipes()[recipe].command


def shared_epochs(recipes: Sequence[str], quantity: str, results: Results) -> int | None:
    """The number of epochs at which the most rows of a table have runs, the larger of several.

    Rows are to be compared at equal epochs, if they can be.
    """
    rows: Counter[int] = Counter()
    for recipe in recipes:
        settings = _settings(recipe, quantity, results, frozenset(recipes))
        allowed = all_recipes()[recipe].recipe.epochs
        rows.update({runs[0]["epochs"] for runs in settings if runs[0]["epochs"] <= allowed})
    return max(rows, key=lambda epochs: (rows[epochs], epochs), default=None)


def best_runs(
    recipe: str,
    quantity: str,
    results: Results,
    others: frozenset[str] = frozenset(),
    unit: float = 1,
    epochs: int | None = None,
) -> Value:
    """The runs that a row shows: all seeds of the setting that comes nearest to the paper's.

    Runs of the row's recipe count, and those of recipes that train the same model on the same data
    by another schedule. Of several settings one with the epochs that are asked for is shown; else
    the one with the most epochs, up to the paper's; then the one with the fewest departures, then
    that with the most seeds. Where that has fewer epochs than the paper's and another has them all,
    both are shown.

    Args:
        recipe: The row's.
        quantity: The column, "top1".
        results: What there is.
        others: Recipes of other rows of the table, whose runs are not this row's.
        unit: What the files' numbers are multiplied by.
        epochs: How many other rows of the table have.
    """
    wanted = all_recipes()[recipe].recipe
    settings = _settings(recipe, quantity, results, others)
    if not settings:
        return Missing((training_command(recipe),))

    def rank(runs: list[Row]) -> tuple[bool, bool, int, int, int]:
        trained = runs[0]["epochs"]
        few = -len(departures(runs[0], wanted))
        seeds = len({run["seed"] for run in runs})
        return trained == epochs, trained <= wanted.epochs, trained, few, seeds

    def measured(runs: list[Row]) -> Measured:
        runs = sorted(runs, key=lambda run: run["seed"])
        departed = departures(runs[0], wanted)
        files = tuple(sorted({run["file"] for run in runs}))
        return Measured(
            tuple(unit * run[quantity] for run in runs),
            _in_short(departed),
            _source(runs, departed, files),
            files,
            runs[0]["recipe"],
            (training_command(recipe),) if departed else (),
        )

    best: list[Row] = max(settings, key=rank)
    full = [runs for runs in settings if runs[0]["epochs"] == wanted.epochs]
    if not full or best in full:
        return measured(best)
    longest = measured(max(full, key=rank))
    in_full = replace(longest, departs=(f"{wanted.epochs} epochs", *longest.departs))
    return replace(measured(best), in_full=in_full, commands=longest.commands)


def _settings(
    recipe: str, quantity: str, results: Results, others: frozenset[str]
) -> list[list[Row]]:
    """The runs that count for a row, those of one setting together."""
    wanted = all_recipes()[recipe].recipe
    settings: dict[tuple[str, ...], list[Row]] = {}
    for run in results.runs:
        if run.get(quantity) is not None and _counts(run, wanted, others - {recipe}):
            setting = run["recipe"], *map(str, departures(run, wanted).items())
            settings.setdefault(setting, []).append(run)
    return list(settings.values())


def departures(run: Row, wanted: Recipe) -> dict[str, str]:
    """The fields that decide a result in which a run differs from a recipe: "0.001 → 0.0005"."""
    used = all_recipes()[run["recipe"]].recipe
    fields: dict[str, list[str]] = {}
    changes = [change for change in run["changes"].split("; ") if change]
    for change in [*differences(wanted, used), *changes]:
        name, _, values = change.partition(": ")
        before, _, after = values.partition(" → ")
        fields[name] = [fields.get(name, [before])[0], after]
    if run["epochs"] != wanted.epochs:
        fields["epochs"] = [str(wanted.epochs), str(run["epochs"])]
    return {
        name: f"{before} → {after}"
        for name, (before, after) in fields.items()
        if before != after and name not in HARMLESS
    }


def _counts(run: Row, wanted: Recipe, others: frozenset[str]) -> bool:
    known = all_recipes().get(run["recipe"])
    if known is None or run["recipe"] in others:
        return False
    if (_network(known.recipe), known.recipe.data) != (_network(wanted), wanted.data):
        return False
    changed = {change.partition(": ")[0] for change in run["changes"].split("; ")}
    schedule = {"model.drop_path", *HARMLESS}
    return not any(
        name == "data.name" or (name.startswith("model.") and name not in schedule)
        for name in changed
    )


def _network(recipe: Recipe) -> Any:
    """The model of a recipe; how much of it is left out in training belongs to the schedule."""
    model: Any = recipe.model
    return replace(model, drop_path=0.0) if hasattr(model, "drop_path") else model


def _in_short(departed: dict[str, str]) -> tuple[str, ...]:
    """The departures of most weight with their values, all others in two words."""
    shown = {"epochs": "epochs", "data.num_classes": "classes"}
    said = [
        f"{departed[k].rpartition(' ')[2]} {word}" for k, word in shown.items() if k in departed
    ]
    return (*said, *(["changed recipe"] if departed.keys() - shown.keys() else []))


def _source(runs: list[Row], departed: dict[str, str], files: tuple[str, ...]) -> str:
    seeds = sorted({run["seed"] for run in runs})
    hardware = ", ".join(dict.fromkeys(run["hardware"] for run in runs))
    sentences = [
        f"{runs[0]['epochs']} epochs, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, {hardware}"
    ]
    if departed:
        changes = "; ".join(f"{name}: {change}" for name, change in departed.items())
        sentences.append(f"departs from the paper's setting in {changes}")
    sentences.append(", ".join(f"`{file}`" for file in files))
    return "; ".join(sentences)
