"""Reproduction: the right results beside the paper's numbers, and a command for every other."""

import itertools
import re
import shlex
import subprocess
import sys
from io import StringIO

import pytest
import typer
from rich.console import Console

from ripple_lab import commands as cli
from ripple_lab import paper
from ripple_lab.bench.measure import matching_names
from ripple_lab.bench.model import SYSTEMS
from ripple_lab.commands import train as commands
from ripple_lab.files import write_csv
from ripple_lab.recipes import find_recipe
from ripple_lab.reproduce import charts, networks
from ripple_lab.reproduce.cifar_blocks import CLAIMS, difference, verdict
from ripple_lab.reproduce.commands import CATALOGUE, find_names, reproduce
from ripple_lab.reproduce.pages import how_ours_run
from ripple_lab.reproduce.queries import known
from ripple_lab.reproduce.speeds import exponent, operator_command
from ripple_lab.reproduce.table_columns import COLUMNS
from ripple_lab.reproduce.tables import TABLES
from ripple_lab.results import Results, committed_results

BY_NAME = {table.name: table for table in TABLES}


def run(recipe, top1, epochs=300, seed=0, changes=""):
    row = {"recipe": recipe, "changes": changes, "seed": seed, "epochs": epochs, "top1": top1}
    return row | {"top5": top1 + 20, "hardware": "a GPU"}


def operator(system, tokens, milliseconds, **others):
    row = {"hardware": "a GPU", "dtype": "float32", "batch": 4, "heads": 6, "head_dim": 16}
    row |= {"max_distance": 4, "tokens": tokens, "system": system, "status": "ok"}
    times = {"median_ms": milliseconds, "peak_mb": milliseconds}
    return [row | {"pass": step} | times | others for step in ("forward", "forward+backward")]


def model(system, speed, tokens=256, batch=64, **others):
    row = {"hardware": "a GPU", "dtype": "bfloat16", "compiled": True, "tokens": tokens}
    row |= {"batch": batch, "system": system, "pass": "forward", "status": "ok", "peak_mb": 1}
    row |= {"embed_dim": 192}
    return row | {"median_ms": 1e3 * batch / speed, "images_per_second": speed} | others


@pytest.fixture
def results(tmp_path):
    """Writes rows, each list to a file of its own, and reads them all."""

    def write(*files):
        for number, rows in enumerate(files):
            path = tmp_path / "results" / f"folder {number}" / "any name.csv"
            path.parent.mkdir(parents=True)
            write_csv(rows, path)
        return Results(tmp_path / "results")

    (tmp_path / "results").mkdir()
    return write


def ours(table, column, label, results):
    """The cell of a table as it is printed, and the commands of what it lacks."""
    table = BY_NAME[table]
    cells = COLUMNS[column].ours(table, results)
    cell = cells[[row.label for row in table.rows].index(label)]
    text = "; ".join(number.text(COLUMNS[column].decimals[1]) for number in cell)
    return text, [number.command for number in cell if number.command]


def test_files_are_told_apart_by_their_columns(results):
    found = results(
        [run("digits", 98.0)],
        operator("ripple naive", 1024, 1.0),
        [model("DeiT-LA", 100.0)],
        [{"kind": "ripples", "step": 1, "epoch": 0.5, "loss": 4.0, "jsd": 0.1}],
        [{"version": "1", "kernel": "forward", "microseconds": 3, "tokens": "128x128"}],
    )
    kinds = ("runs", "operators", "models", "metrics", "detectors")
    assert [len(found.of_kind(kind)) for kind in kinds] == [1, 2, 1, 1, 0]
    assert found.of_kind("runs")[0]["file"] == "folder 0/any name.csv"


def test_a_cell_that_is_no_number_and_a_folder_that_is_not_there_are_named(results, tmp_path):
    with pytest.raises(ValueError, match=r"column epochs holds numbers; line 2 of .* has 'many'"):
        results([run("digits", 98.0, epochs="many")]).of_kind("runs")
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        Results(tmp_path / "nowhere")


RIPPLE, SHORT = "cifar100-ripple-tiny", "cifar100-short-ripple-tiny"
DEIT = "cifar100-short-deit-tiny"
AGAIN = [f"ripple train {RIPPLE}"]
CHANGES = "optimizer.lr: 0.0005 → 0.001; data.num_classes: 100 → 10; epochs: 300 → 30"


@pytest.mark.parametrize(
    ("runs", "text", "commands"),
    [
        ([(RIPPLE, 73.5)], "73.5", []),
        ([(RIPPLE, 70.0 + n, 300, n) for n in (0, 1, 1)], "70.5, 70.0–71.0 (2 seeds)", []),
        # Another algorithm or another rhythm of evaluation is no departure.
        ([(RIPPLE, 70.0, 300, 0, "model.implementation: None → naive"),
          (RIPPLE, 71.0, 300, 1, "validate_every: 1 → 5")], "70.5, 70.0–71.0 (2 seeds)", []),
        ([(RIPPLE, 50.0, 30, 0, CHANGES)], "50.0 (30 epochs, 10 classes, changed recipe)", AGAIN),
        # The same model on another schedule counts, the longest first, and says so.
        ([("cifar100-20-ripple-tiny", 44.1, 20), (SHORT, 60.0, 60)],
         "60.0 (60 epochs, changed recipe)", AGAIN),
        # Rows are compared at equal epochs; a result at full length stands beside.
        ([(DEIT, 40.0, 60), (SHORT, 50.0, 60), (SHORT, 55.0, 100)],
         "50.0 (60 epochs, changed recipe)", AGAIN),
        ([(DEIT, 40.0, 60), (SHORT, 50.0, 60), (RIPPLE, 73.0)],
         "73.0; 50.0 (60 epochs, changed recipe)", []),
        # Another model, or an unknown recipe, is not this row's.
        ([(RIPPLE, 50.0, 300, 0, "model.weights: None → fixed"), (f"{RIPPLE}-r8", 51.0),
          ("own", 52.0)], "not yet run", AGAIN),
    ],
)  # fmt: skip
def test_a_row_shows_the_runs_nearest_to_the_papers_setting(results, runs, text, commands):
    assert ours("table2", "top1", "ripple", results([run(*row) for row in runs])) == (
        text,
        commands,
    )


def test_detectors_have_rows_by_epochs_and_are_timed_on_one_machine(results):
    row = {"part": "detector", "hardware": "a GPU", "dtype": "bfloat16", "batch": 1, "tokens": 850}
    row |= {"pass": "forward", "status": "ok", "median_ms": 12.5, "system": "smca_resnet50"}
    other = row | {"hardware": "a slow one", "batch": 2, "system": "smca_la_resnet50"}
    found = results([run("coco-smca-108", 0.0, 108) | {"ap": 0.421}], [row], [other])
    assert ours("table3", "ap", "SMCA, 108 epochs", found)[0] == "42.1"
    command = "ripple train coco-smca-50 --hardware.devices 8"
    assert ours("table3", "ap", "SMCA, 50 epochs", found) == ("not yet run", [command])
    assert ours("table3", "seconds", "SMCA, 50 epochs", found)[0] == "0.0125"
    assert ours("table3", "seconds", "SMCA-LA, 50 epochs", found)[0] == "not yet run"


def test_speeds_come_from_one_machine_in_the_papers_setting(results):
    found = results(
        [model("ripple, R_max 4", 900.0, batch=392), model("DeiT-LA", 3000.0, batch=392)],
        [model("ripple, R_max 4", 800.0), model("DeiT-LA", 2500.0, tokens=196)],
        [model("DeiT-LA of 4 layers", 10.0, hardware="another")],
    )
    assert ours("table8", "speed", "ripple", found)[0] == "800"
    assert ours("table8", "speed", "DeiT-LA, 4 layers", found)[0] == "not yet run"
    text, (command,) = ours("table8", "speed", "DeiT-LA", found)
    assert text == "not yet run"
    wanted = "DeiT-LA of 4 layers,DeiT-LA,ripple of 4 layers,R_max 4"
    assert f"--sides 16 --batch 64 --forward-alone --only '{wanted}'" in command


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_law_is_found(power):
    exact = [(side * side, 3e-4 * (side * side) ** power) for side in (32, 64, 128, 256)]
    assert exponent([(196, 1e6), *exact]) == pytest.approx(power, abs=1e-9)  # 196: too small
    assert exponent(exact[:1]) is None


def test_complexity_is_fitted_to_each_operator(results):
    powers = {"softmax SDPA": 2, "linear attention": 1, "ripple naive": 2, "ripple table": 1}
    rows = [row for (system, power), tokens in itertools.product(powers.items(), (1024, 4096))
            for row in operator(system, tokens, 1e-6 * tokens**power)]  # fmt: skip
    for side in (32, 64):
        dense = operator("ripple table", side**2, 1e-6 * side**3, max_distance=side - 1)
        rows.extend(dense)
    found = results(rows)
    texts = [ours("table5", "both", row.label, found)[0] for row in BY_NAME["table5"].rows]
    assert texts == ["2.00", "not yet run", "1.00", "2.00", "1.50", "1.00", "not yet run"]


def test_claims_are_confirmed_or_not_at_equal_epochs(results):
    tops = {RIPPLE: 75.0, "cifar100-deit-tiny": 72.4, "cifar100-convit-tiny": 76.5}
    found = results(
        [run(*top) for top in tops.items()], [run("cifar100-short-deit-la-tiny", 9, 60)]
    )
    said = {c.text: verdict(c, difference(c, 300, found)) for c in CLAIMS}
    assert said["ripple is 2.5 points or more above DeiT"] == "confirmed"
    assert said["ripple is at most 1 point below ConViT"] == "not confirmed"
    assert said["ripple is 5 points or more above DeiT-LA"] == "not yet run"


def test_every_number_of_the_paper_has_a_place():
    shown = {(row.recipe, value) for t in TABLES for row in t.rows
             for name, value in row.paper.items() if name in t.columns}  # fmt: skip
    lists = [paper.ACCURACY, paper.AVERAGE_PRECISION]
    assert {(name, value) for said in lists for name in said for value in said[name]} <= shown
    singles = [paper.TOP5_OF_TABLE_7, paper.TOP1_OF_TABLE_8, *paper.SPEED.values()]
    assert {pair for said in singles for pair in said.items()} <= shown
    sizes = {(known()[recipe].recipe.model.name, value) for recipe, value in shown if recipe}
    everything = {**paper.PARAMETERS, **paper.DETECTORS}.items()
    assert {(name, value) for name, numbers in everything for value in numbers.values()} <= sizes


def test_networks_are_as_they_were_counted():
    kept = {row["recipe"]: row for row in committed_results().file(networks.FILE)}
    assert kept.keys() == {row.recipe for table in TABLES for row in table.rows if row.recipe}
    of_table_6 = [row.recipe for row in BY_NAME["table6"].rows]
    for recipe in ("cifar100-convit-tiny", "coco-smca-ripple-50", *of_table_6[::2]):
        counted = networks.count(find_recipe(recipe))
        assert counted == {name: kept[recipe][name] for name in counted}, recipe
    lines = "\n".join(how_ours_run(BY_NAME["table6"]))  # a page states what its own rows ran with
    assert "DPFP: the feature map `dpfp` of 64 features, queries and keys as they are" in lines


def parse(command):
    """Refuses what the command `ripple` would refuse; nothing is run."""
    words = shlex.split(command)
    if words[1] == "train":
        commands.override(find_recipe(words[2]), words[3:], "ripple train")
        return
    group = typer.main.get_command(cli.app)
    with group.make_context("ripple", words[1:]) as context:
        _, bench, rest = group.resolve_command(context, words[1:])
        _, benchmark, rest = bench.resolve_command(context, rest)
        parameters = benchmark.make_context(benchmark.name, rest, parent=context).params
    if words[2] == "model":
        parts = parameters["only"].split(",")
        assert all(any(part in name for name in SYSTEMS) for part in parts)
        assert len(matching_names(",".join(parts), SYSTEMS)) <= len(parts) + 1


def test_every_missing_number_has_a_command_that_the_program_understands(tmp_path):
    (tmp_path / "none").mkdir()
    lacking = reproduce(["all"], tmp_path, Console(file=StringIO()), tmp_path / "none")
    lines = [line for name, lines in lacking.items() for line in lines]
    assert all(lacking[name] for name in CATALOGUE if name != "figure-1")
    assert all("not yet run: " in line for line in lines)
    found = dict.fromkeys(
        command for line in lines for command in re.findall(r"`(ripple [^`]+)`", line)
    )
    for command in found:
        parse(command)
    recipes = {row.recipe for table in TABLES for row in table.rows if row.recipe}
    assert {known()[recipe].command for recipe in recipes} <= found.keys()
    assert operator_command() in found
    # Nothing of ours, no picture.
    assert not any(path.stem.startswith("table") for path in tmp_path.glob("*.png"))


def test_everything_that_is_committed_is_drawn(tmp_path):
    lacking = reproduce(["all"], tmp_path, Console(file=StringIO()))
    assert not any(lacking[name] for name in ("figure-speed", "figure-speed-partitions", "table5"))
    assert "dense: tables, kernels" in (tmp_path / "figure-speed-partitions.svg").read_text()
    for name in CATALOGUE:
        drawn = f"({name}.png)" in (tmp_path / f"{name}.md").read_text()
        assert drawn or name in ("table1", "table3", "table6", "table7")
        assert drawn == (tmp_path / f"{name}.png").exists() == (tmp_path / f"{name}.svg").exists()


def test_words_beside_dots_do_not_cover_each_other(monkeypatch, tmp_path, results):
    changed = "optimizer.decay_feature_maps: True → False"
    short = {"deit-la": 40.0, "convit": 55.0, "ripple": 57.0}
    runs = [run(f"cifar100-short-{name}-tiny", top1, 60) for name, top1 in short.items()]
    found = results([run("cifar100-ripple-tiny", 75.0, changes=changed), *runs])
    figures, table = [], BY_NAME["table2"]
    monkeypatch.setattr(charts, "save_both", lambda figure, path: figures.append(figure))
    charts.draw_table(table, {"top1": COLUMNS["top1"].ours(table, found)}, tmp_path)
    figures[0].canvas.draw()
    words = [text for text in figures[0].axes[0].texts if "epochs" in text.get_text()]
    assert len(words) == 4
    for one, other in itertools.combinations(words, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent())


def test_a_table_needs_neither_torch_nor_timm(tmp_path):
    code = f"""
import sys
from ripple_lab.start import main
sys.argv = ["ripple", "reproduce", "table2", "--output", {str(tmp_path)!r}]
try:
    main()
finally:
    assert not {{"torch", "timm", "lightning"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| ripple | 5.47 | 5.46 | 73.94 |" in done.stdout


def test_all_names_each_table_once():
    assert find_names(["all", "table1"]) == list(CATALOGUE)
