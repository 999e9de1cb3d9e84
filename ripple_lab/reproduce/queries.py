"""Which training runs stand for a recipe, and where they left it."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ripple_lab.recipes import Listed, all_recipes
from ripple_lab.reproduce.markdown import rounded
from ripple_lab.results import Results, Row, committed_results
from ripple_lab.train.recipe import MAY_CHANGE, differences

# Fields that do not change what is learned; some decide only when and where it is evaluated.
HARMLESS = MAY_CHANGE | {"name", "seed", "ema_decay", "data.source", "data.in_memory"}


@dataclass(frozen=True)
class Seeds:
    """The runs of one setting, a seed each, and the fields in which they left a recipe."""

    runs: tuple[Row, ...]
    departures: dict[str, str]  # "0.001 → 0.0005" by field

    @property
    def epochs(self) -> int:
        return self.runs[0]["epochs"]

    @property
    def recipe(self) -> str:
        return self.runs[0]["recipe"]

    def mean(self, metric: str) -> float:
        return sum(run[metric] for run in self.runs) / len(self.runs)


def settings(
    recipe: str, metric: str, results: Results, others: Collection[str] = ()
) -> list[Seeds]:
    """The runs of a recipe's model on its data that have a metric, those of one setting together.

    Runs of another recipe count if only the schedule differs, unless it is one of `others`.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for run in results.of_kind("runs"):
        counts = run["recipe"] == recipe or run["recipe"] not in others
        if counts and run.get(metric) is not None and _same_model(run, recipe):
            key = run["recipe"], *map(str, departures(run, recipe).items())
            found.setdefault(key, []).append(run)
    return [
        Seeds(tuple(sorted(runs, key=lambda run: run["seed"])), departures(runs[0], recipe))
        for runs in found.values()
    ]


def best(found: Iterable[Seeds], epochs: int | None = None) -> Seeds | None:
    """The setting that departs least from its recipe, then the one with the most seeds.

    If `epochs` is given, only settings with that many count.
    """
    kept = [seeds for seeds in found if epochs in (None, seeds.epochs)]
    return max(kept, key=lambda it: (-len(it.departures), len(it.runs)), default=None)


def at_epochs(recipe: str, epochs: int, results: Results, metric: str = "top1") -> Seeds | None:
    """The runs of a recipe's model with that many epochs, those nearest to the paper's setting."""
    return best(settings(recipe, metric, results), epochs)


def own_result(recipe: str) -> str:
    """The mean result of a recipe's own full runs, with a star if they depart from it."""
    metric, unit = ("ap", 100) if known()[recipe].recipe.task == "detection" else ("top1", 1)
    own = [it for it in settings(recipe, metric, committed_results()) if it.recipe == recipe]
    seeds = best(own, known()[recipe].recipe.epochs)
    if seeds is None:
        return "–"
    return rounded(unit * seeds.mean(metric), 1) + "*" * bool(seeds.departures)


def shared_epochs(recipes: Collection[str], metric: str, results: Results) -> int | None:
    """The number of epochs for which most of these recipes have runs; of equals, the largest.

    Rows of a table are compared at equal epochs, if they can be.
    """
    counts: Counter[int] = Counter()
    for recipe in recipes:
        most = known()[recipe].recipe.epochs
        found = {seeds.epochs for seeds in settings(recipe, metric, results, recipes)}
        counts.update(epochs for epochs in found if epochs <= most)
    return max(counts, key=lambda epochs: (counts[epochs], epochs), default=None)


def shown_runs(
    recipe: str, metric: str, results: Results, others: Collection[str], epochs: int | None
) -> list[Seeds]:
    """What a row of a table shows: the runs at full length, then those at the table's `epochs`.

    Where there are neither, the longest.
    """
    found = settings(recipe, metric, results, others)
    full = known()[recipe].recipe.epochs
    shown = [best(found, full), best(found, epochs) if epochs not in (None, full) else None]
    if not any(shown) and found:
        allowed = [seeds.epochs for seeds in found if seeds.epochs <= full]
        longest = max(allowed) if allowed else max(seeds.epochs for seeds in found)
        shown = [best(found, longest)]
    return [seeds for seeds in shown if seeds]


def departures(run: Row, recipe: str) -> dict[str, str]:
    """The fields that decide a result in which a run differs from a recipe: "0.001 → 0.0005"."""
    fields: dict[str, list[str]] = {}
    for change in [*_changes(recipe, run["recipe"]), *_own_changes(run)]:
        name, _, values = change.partition(": ")
        before, _, after = values.partition(" → ")
        fields[name] = [fields.get(name, [before])[0], after]
    wanted = known()[recipe].recipe.epochs
    if run["epochs"] != wanted:
        fields["epochs"] = [str(wanted), str(run["epochs"])]
    return {
        name: f"{before} → {after}"
        for name, (before, after) in fields.items()
        if before != after and name not in HARMLESS
    }


def in_short(seeds: Seeds) -> list[str]:
    """The departures of most weight with their values, all others in two words."""
    shown = {"epochs": "epochs", "data.num_classes": "classes"}
    found = seeds.departures
    said = [f"{found[k].rpartition(' ')[2]} {word}" for k, word in shown.items() if k in found]
    return said + ["changed recipe"] * bool(found.keys() - shown.keys())


@cache
def known() -> dict[str, Listed]:
    """Every recipe by its name."""
    return all_recipes()


def _same_model(run: Row, recipe: str) -> bool:
    if run["recipe"] not in known() or not _same_network(run["recipe"], recipe):
        return False
    changed = {change.partition(": ")[0] for change in _own_changes(run)}
    schedule = {"model.drop_path", *HARMLESS}
    return not any(
        name == "data.name" or (name.startswith("model.") and name not in schedule)
        for name in changed
    )


def _own_changes(run: Row) -> list[str]:
    return [change for change in run["changes"].split("; ") if change]


@cache
def _changes(recipe: str, other: str) -> list[str]:
    return differences(known()[recipe].recipe, known()[other].recipe)


@cache
def _same_network(recipe: str, other: str) -> bool:
    """Whether models and data are the same, stochastic depth aside."""
    one, two = (known()[name].recipe for name in (recipe, other))
    models: list[Any] = [
        replace(it.model, drop_path=0.0) if hasattr(it.model, "drop_path") else it.model
        for it in (one, two)
    ]
    return models[0] == models[1] and one.data == two.data
