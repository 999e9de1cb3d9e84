"""The columns of tables, each with the query that finds our numbers."""

from collections.abc import Callable
from functools import cache

from ripple_lab.reproduce import networks
from ripple_lab.reproduce.queries import Seeds, in_short, known, shared_epochs, shown_runs
from ripple_lab.reproduce.speeds import growth, images_per_second, seconds
from ripple_lab.reproduce.table import Cell, Column, Number, Table
from ripple_lab.results import Results, Row, committed_results


def trained(metric: str, unit: float = 1) -> Callable[[Table, Results], list[Cell]]:
    """A result of training: at full length, and where rows are compared at fewer epochs, there."""

    def ours(table: Table, results: Results) -> list[Cell]:
        recipes = {row.recipe for row in table.rows}
        epochs = shared_epochs(recipes, metric, results)
        return [
            tuple(
                _number(seeds, row.recipe, metric, unit, first=place == 0)
                for place, seeds in enumerate(
                    shown_runs(row.recipe, metric, results, recipes, epochs)
                )
            )
            or (Number(command=known()[row.recipe].command),)
            for row in table.rows
        ]

    return ours


def counted(quantity: str) -> Callable[[Table, Results], list[Cell]]:
    """What a recipe's network is made of."""
    return lambda table, _: [(Number((network(row.recipe)[quantity],)),) for row in table.rows]


@cache
def network(recipe: str) -> Row:
    """The counts of a recipe's network: those of the file, else made now."""
    kept = {row["recipe"]: row for row in committed_results().file(networks.FILE)}
    return kept.get(recipe) or networks.count(known()[recipe].recipe)


def _number(seeds: Seeds, recipe: str, metric: str, unit: float, first: bool) -> Number:
    notes, full = in_short(seeds), known()[recipe].recipe.epochs
    if seeds.epochs == full and notes:
        notes.insert(0, f"{full} epochs")
    numbers = sorted({run["seed"] for run in seeds.runs})
    said = [f"{seeds.epochs} epochs, seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"]
    said[0] += f", {', '.join(dict.fromkeys(run['hardware'] for run in seeds.runs))}"
    if seeds.recipe != recipe:
        said.append(f"`{seeds.recipe}`")
    if seeds.departures:
        changes = "; ".join(f"{name}: {change}" for name, change in seeds.departures.items())
        said.append(f"departs from the paper's setting in {changes}")
    said.append(", ".join(f"`{file}`" for file in sorted({run["file"] for run in seeds.runs})))
    return Number(
        tuple(unit * run[metric] for run in seeds.runs),
        tuple(notes),
        "; ".join(said),
        known()[recipe].command if seeds.departures and first else "",
    )


COLUMNS: dict[str, Column] = {
    "parameters": Column("M parameters", (2, 2), counted("millions")),
    "detector": Column("M parameters", (1, 2), counted("millions")),
    "gflops": Column("G multiply-adds", (0, 0), counted("gflops")),
    "seconds": Column("seconds an image", (3, 4), seconds),
    "top1": Column("top-1 %", (2, 1), trained("top1")),
    "top5": Column("top-5 %", (2, 1), trained("top5")),
    "speed": Column("images/s", (0, 0), images_per_second),
    "ap": Column("AP", (1, 1), trained("ap", 100)),
    "ap_small": Column("AP, small", (1, 1), trained("ap_small", 100)),
    "ap_medium": Column("AP, medium", (1, 1), trained("ap_medium", 100)),
    "ap_large": Column("AP, large", (1, 1), trained("ap_large", 100)),
    "forward": Column("power of T: time, forward", (1, 2), growth("forward", "median_ms")),
    "both": Column(
        "power of T: time, both passes", (1, 2), growth("forward+backward", "median_ms")
    ),
    "memory": Column(
        "power of T: memory, both passes", (1, 2), growth("forward+backward", "peak_mb")
    ),
}
