"""A page for a table: the table, its picture, how ours ran, and the commands of what is missing."""

from pathlib import Path

from ripple_lab.reproduce.queries import known
from ripple_lab.reproduce.table import Table, TableRow, grid, grouped, missing, sources
from ripple_lab.reproduce.table_columns import COLUMNS, network
from ripple_lab.results import Results

SCALINGS = {
    "none": "as they are",
    "scaled": "times D^(−1/4)",
    "unit": "of unit length",
    "unit-scaled": "of length D^(1/4)",
}


def make_table(table: Table, results: Results, folder: Path) -> tuple[str, list[str]]:
    """Draws a table, if there is something of ours to draw; gives its page, and what is missing."""
    from ripple_lab.reproduce.charts import draw_table, is_drawn

    filled = {name: COLUMNS[name].ours(table, results) for name in table.columns}
    parts = [f"# {table.title}", table.setting, grid(table, COLUMNS, filled)]
    if is_drawn(table, filled):
        draw_table(table, filled, folder)
        parts.append(f"![{table.title}]({table.name}.png)")
    lacking = missing(table, filled)
    sections = {  # where a run left its recipe, the second says so
        "What our recipes run with": how_ours_run(table),
        "Where ours come from": sources(table, filled),
        "Not there yet": lacking,
    }
    for heading, lines in sections.items():
        if lines:
            parts.append(f"## {heading}\n\n" + "\n".join(f"- {line}" for line in lines))
    if lacking:
        parts.append(
            "`ripple results RUN … --output benchmarks/results/NAME.csv` gathers finished runs; "
            "benchmarks write there by themselves. A checkout looks there, an installed package "
            "with `--results benchmarks/results`."
        )
    return "\n\n".join(parts) + "\n", lacking


def how_ours_run(table: Table) -> list[str]:
    """What the rows' recipes and networks decide, rows that agree on one line."""
    rows = {table.name_of(row): row for row in table.rows if row.recipe}
    schedules = grouped(((_schedule(row), name) for name, row in rows.items()), len(rows))
    return schedules + grouped(((_attention(row), name) for name, row in rows.items()), len(rows))


def _schedule(row: TableRow) -> str:
    recipe = known()[row.recipe].recipe
    optimizer = recipe.optimizer
    clip = f"clipped to norm {optimizer.clip:g}" if optimizer.clip else "not clipped"
    return (
        f"recipes of {recipe.epochs} epochs, {recipe.batch_size:,} images at a time, learning rate "
        f"{optimizer.lr:g}, gradients {clip}"
    )


def _attention(row: TableRow) -> str:
    layer = network(row.recipe)
    if layer["feature_map"] is None:
        return "softmax attention, no feature map"
    return (
        f"the feature map `{layer['feature_map']}` of {layer['features']} features, queries and "
        f"keys {SCALINGS[layer['scaling']]}, ε = {layer['eps']:g} in the denominator"
    )
