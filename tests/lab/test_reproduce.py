"""Reproduction: the right results beside the paper's numbers, and a command for every other."""

import csv
import itertools
import math
import re
import shlex
from io import StringIO
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

from ripple_lab import commands as cli
from ripple_lab import paper
from ripple_lab.bench.measure import matching_names
from ripple_lab.bench.model import SYSTEMS
from ripple_lab.commands import train as commands
from ripple_lab.divergence import divergence_from_fixed, jensen_shannon, uniform_divergence
from ripple_lab.files import write_csv
from ripple_lab.recipes import find_recipe
from ripple_lab.reproduce import charts, readme
from ripple_lab.reproduce.columns import COLUMNS
from ripple_lab.reproduce.commands import catalogue, find_names, list_all, reproduce
from ripple_lab.reproduce.figures import divergence_runs
from ripple_lab.reproduce.found import Results, read_results
from ripple_lab.reproduce.pages import fill, grid, missing, sources
from ripple_lab.reproduce.runs import best_runs
from ripple_lab.reproduce.speeds import exponent, operator_commands
from ripple_lab.reproduce.tables import TABLES
from ripple_lab.reproduce.values import Measured, Missing

ROOT = Path(__file__).parents[2]
BY_NAME = {table.name: table for table in TABLES}


def run(recipe, top1, epochs=300, seed=0, changes="", hardware="a GPU", **others):
    row = {"recipe": recipe, "changes": changes, "seed": seed, "epochs": epochs, "top1": top1}
    return row | {"top5": top1 + 20, "hardware": hardware} | others


def operator(system, tokens, milliseconds, **others):
    row = {"hardware": "a GPU", "dtype": "float32", "batch": 4, "heads": 6, "head_dim": 16}
    row |= {"max_distance": 4, "tokens": tokens, "system": system, "status": "ok"}
    times = {"median_ms": milliseconds, "peak_mb": milliseconds}
    return [row | {"pass": step} | times | others for step in ("forward", "forward+backward")]


def model(system, speed, tokens=256, batch=64, **others):
    row = {"hardware": "a GPU", "dtype": "bfloat16", "compiled": True, "tokens": tokens}
    row |= {"batch": batch, "system": system, "pass": "forward", "status": "ok", "peak_mb": 1}
    return row | {"median_ms": 1e3 * batch / speed, "images_per_second": speed} | others


@pytest.fixture
def results(tmp_path):
    """Writes rows, each list to a file of its own, and reads them all."""

    def write(*files):
        for number, rows in enumerate(files):
            path = tmp_path / "results" / f"folder {number}" / "any name.csv"
            path.parent.mkdir(parents=True)
            write_csv(rows, path)
        return read_results(tmp_path / "results")

    (tmp_path / "results").mkdir()
    return write


def row_of(table, label):
    return next(n for n, row in enumerate(BY_NAME[table].rows) if row.label == label)


def ours(table, column, label, results):
    table = BY_NAME[table]
    return COLUMNS[column].ours(table, results)[row_of(table.name, label)]


def test_files_are_told_apart_by_their_columns(results):
    found = results(
        [run("digits", 98.0)],
        operator("ripple naive", 1024, 1.0),
        [model("DeiT-LA", 100.0)],
        [{"kind": "ripples", "step": 1, "epoch": 0.5, "loss": 4.0, "jsd": 0.1}],
        [{"version": "1", "kernel": "forward", "microseconds": 3}],
    )
    kinds = (found.runs, found.operators, found.models, found.metrics, found.detectors)
    assert [len(rows) for rows in kinds] == [1, 2, 1, 1, 0]
    assert found.runs[0]["file"] == "folder 0/any name.csv"


def test_a_cell_that_is_no_number_is_named(results):
    with pytest.raises(ValueError, match=r"column epochs holds numbers; line 2 of .* has 'many'"):
        results([run("digits", 98.0, epochs="many")])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        read_results(tmp_path / "nowhere")


def test_a_result_at_full_length_is_shown_as_it_is(results):
    found = results([run("cifar100-ripple-tiny", 73.5)])
    value = ours("table2", "top1", "ripple", found)
    assert value.text(1) == "73.5" and not value.commands
    assert ours("table2", "top5", "ripple", found).text(1) == "93.5"
    assert ours("table4", "top1", "fixed", found) == Missing(
        ("ripple train cifar100-ripple-tiny-fixed",)
    )


def test_seeds_are_averaged_and_a_run_in_two_files_counts_once(results):
    rows = [run("cifar100-deit-tiny", top1, seed=n) for n, top1 in enumerate((66.0, 67.0, 69.5))]
    value = ours("table2", "top1", "DeiT", results(rows, rows[:2]))
    assert value.text(1) == "67.5, 66.0–69.5 (3 seeds)"
    assert "300 epochs, seeds 0, 1, 2, a GPU" in value.source


def test_departures_are_said(results):
    changes = "optimizer.lr: 0.0005 → 0.001; data.num_classes: 100 → 10; epochs: 300 → 30"
    found = results([run("cifar100-ripple-tiny", 50.0, 30, changes=changes)])
    value = ours("table4", "top1", "ripple", found)
    assert isinstance(value, Missing)  # the first ripple of table 4 is R_max 2
    value = ours("table2", "top1", "ripple", found)
    assert value.text(1) == "50.0 (30 epochs, 10 classes, changed recipe)"
    assert "optimizer.lr: 0.0005 → 0.001" in value.source
    assert value.commands == ("ripple train cifar100-ripple-tiny",)


def test_fields_that_change_nothing_are_no_departure(results):
    changes = "model.implementation: None → naive; validate_every: 1 → 5"
    rows = [run("cifar100-ripple-tiny", 70.0, changes=changes)]
    rows.append(run("cifar100-ripple-tiny", 71.0, seed=1))
    assert ours("table2", "top1", "ripple", results(rows)).text(1) == "70.5, 70.0–71.0 (2 seeds)"


def test_the_same_model_on_another_schedule_counts_and_says_so(results):
    found = results(
        [run("cifar100-20-ripple-tiny", 44.1, 20), run("cifar100-short-ripple-tiny", 60.0, 60)]
    )
    value = ours("table2", "top1", "ripple", found)  # more epochs come first
    assert value.text(1) == "60.0 (60 epochs, changed recipe)"
    assert value.recipe == "cifar100-short-ripple-tiny"
    assert "optimizer.lr: 0.0005 → 0.001" in value.source


@pytest.mark.parametrize(("longer", "shown"), [(["ripple"], 60), (["deit", "ripple"], 100)])
def test_rows_are_compared_at_equal_epochs(results, longer, shown):
    rows = [run(f"cifar100-short-{name}-tiny", 50.0, 60) for name in ("deit", "ripple")]
    rows += [run(f"cifar100-short-{name}-tiny", 50.0, 100) for name in longer]
    value = ours("table2", "top1", "ripple", results(rows))
    assert value.text(1) == f"50.0 ({shown} epochs, changed recipe)"


@pytest.mark.parametrize("changes", ["", "optimizer.decay_feature_maps: True → False"])
def test_a_result_at_full_length_stands_beside_that_of_equal_epochs(results, changes):
    rows = [run(f"cifar100-short-{name}-tiny", 50.0, 60) for name in ("deit", "ripple")]
    found = results([*rows, run("cifar100-ripple-tiny", 73.0, changes=changes)])
    value = ours("table2", "top1", "ripple", found)
    full = "300 epochs, changed recipe" if changes else "300 epochs"
    assert value.text(1) == f"73.0 ({full}); 50.0 (60 epochs, changed recipe)"
    assert value.commands == (("ripple train cifar100-ripple-tiny",) if changes else ())
    table = BY_NAME["table2"]
    lines = "\n".join(sources(table, fill(table, found)))
    assert "\nripple (`cifar100-ripple-tiny`): 300 epochs" in lines
    assert "ripple (`cifar100-short-ripple-tiny`): 60 epochs" in lines


def test_another_model_does_not_count(results):
    found = results(
        [
            run("cifar100-ripple-tiny", 50.0, changes="model.weights: None → fixed"),
            run("cifar100-ripple-tiny-r8", 51.0),
            run("own", 52.0),
        ]
    )
    assert isinstance(ours("table2", "top1", "ripple", found), Missing)
    assert best_runs("cifar100-ripple-tiny-r8", "top1", found).text(1) == "51.0"


def test_detectors_of_other_epochs_belong_to_other_rows(results):
    row = run("coco-smca-ripple-108", 0.0, 108) | {"ap": 0.421, "ap_small": 0.23}
    found = results([row])
    assert ours("table3", "ap", "SMCA-ripple, 108 epochs", found).text(1) == "42.1"
    assert ours("table3", "ap", "SMCA-ripple, 50 epochs", found) == Missing(
        ("ripple train coco-smca-ripple-50 --hardware.devices 8",)
    )


def test_detectors_are_timed_on_one_machine(results):
    row = {"part": "detector", "hardware": "a GPU", "dtype": "bfloat16", "batch": 1, "tokens": 850}
    row |= {"pass": "forward", "status": "ok"}
    other = {"hardware": "a slow one", "median_ms": 900.0}
    found = results(
        [row | {"system": "smca_resnet50", "median_ms": 12.5}],
        [row | other | {"system": "smca_resnet50", "batch": 2}],
    )
    table = BY_NAME["table3"]
    times = COLUMNS["seconds"].ours(table, found)
    assert [value.text(4) for value in times] == 2 * ["0.0125", "not yet run", "not yet run"]
    assert times[0].source.startswith("time: a GPU, bfloat16")


def test_speeds_come_from_one_machine(results):
    found = results(
        [model("ripple, R_max 4", 900.0, batch=392), model("DeiT-LA", 3000.0, batch=392)],
        [model("ripple, R_max 4", 800.0), model("DeiT-LA", 2500.0, tokens=196)],
    )
    (ripple, linear) = (ours("table8", "speed", name, found) for name in ("ripple", "DeiT-LA"))
    assert ripple.text(0) == "800"  # of batch 64
    assert isinstance(linear, Missing)
    (command,) = linear.commands
    wanted = "DeiT-LA of 4 layers,DeiT-LA,ripple of 4 layers,R_max 4"
    assert f"--sides 16 --batch 64 --forward-alone --only '{wanted}'" in command
    found.models = [
        *found.models[:2],
        *(model(row["system"], 9000.0, batch=4, embed_dim=96) for row in found.models[:2]),
    ]
    assert ours("table8", "speed", "DeiT-LA", found).text(0) == "3,000 (batch 392)"
    assert ours("table8", "speed", "DeiT-LA", found).commands == (command,)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_law_is_found(power):
    exact = [(side * side, 3e-4 * (side * side) ** power) for side in (32, 64, 128, 256)]
    assert exponent(exact) == pytest.approx(power, abs=1e-9)
    assert exponent([(196, 1e6), *exact]) == pytest.approx(power, abs=1e-9)  # too small to tell
    assert exponent(exact[:1]) is None


def test_complexity_is_fitted_to_each_operator(results):
    powers = {"softmax SDPA": 2, "linear attention": 1, "ripple naive": 2, "ripple table": 1}
    powers["softmax with ripples"] = 2
    rows = [
        row
        for system, power in powers.items()
        for tokens in (1024, 4096)
        for row in operator(system, tokens, 1e-6 * tokens**power)
    ]
    dense = [
        row
        for side in (32, 64)
        for row in operator("ripple table", side**2, 1e-6 * side**3, max_distance=side - 1)
    ]
    found = results(rows, dense)
    table = BY_NAME["table5"]
    values = {row.label: value.text(2) for row, value in
              zip(table.rows, fill(table, found)["both"], strict=True)}  # fmt: skip
    assert values == {
        "softmax attention": "2.00",
        "ripple-softmax": "2.00",
        "linearized attention": "1.00",
        "ripple (naïve)": "2.00",
        "ripple (DP)": "1.50",
        "ripple (DP), R_max 4": "1.00",
        "ripple (tiled), R_max 4": "not yet run",
    }
    assert "fitted at 1,024, 4,096 tokens; a GPU" in sources(table, fill(table, found))[0]


def test_every_number_of_the_paper_has_a_place():
    shown = {(row.recipe, name, value) for t in TABLES for row in t.rows
             for name, value in row.paper.items()}  # fmt: skip
    for recipe, numbers in paper.ACCURACY.items():
        for name, value in zip(("top1", "top5"), numbers, strict=False):
            assert (recipe, name, value) in shown
    for recipe, numbers in paper.AVERAGE_PRECISION.items():
        assert (recipe, "ap", numbers[0]) in shown and (recipe, "ap_large", numbers[3]) in shown
    sizes = {(row.model, row.paper["parameters"]) for t in TABLES for row in t.rows
             if "parameters" in row.paper}  # fmt: skip
    for name, numbers in paper.PARAMETERS.items():
        assert {(name, value) for value in numbers.values()} <= sizes


def test_our_sizes_are_near_the_papers(results):
    for name, largest in (("table1", 0.02), ("table2", 0.05), ("table8", 0.06)):
        table = BY_NAME[name]
        for row, value in zip(
            table.rows, COLUMNS["parameters"].ours(table, results()), strict=True
        ):
            assert value.mean == pytest.approx(row.paper["parameters"], abs=largest), row.label


def parse(command):
    """Refuses what the command `ripple` would refuse; nothing is run."""
    words = shlex.split(command)
    assert words[0] == "ripple"
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
        chosen = matching_names(",".join(parts), SYSTEMS)
        assert all(any(part in name for name in SYSTEMS) for part in parts)
        assert len(chosen) <= len(parts) + 1  # no part names them all
        assert (parameters["batch"], parameters["width"]) in ((4, 96), (64, 192))


def test_every_missing_number_has_a_command_that_the_program_understands(tmp_path):
    lacking = {table.name: missing(table, fill(table, Results())) for table in TABLES}
    figures = [name for name in catalogue() if name not in lacking]
    (tmp_path / "none").mkdir()
    lacking |= reproduce(figures, tmp_path, Console(file=StringIO()), tmp_path / "none")
    printed = 0
    for name, lines in lacking.items():
        assert lines, name
        for line in lines:
            # What no command makes is known and said: benchmarks lack these systems.
            if not line.endswith("`ripple bench model` has no such system yet"):
                found = re.findall(r"`(ripple [^`]+)`", line)
                assert found and "not yet run: " in line
                for command in found:
                    parse(command)
                    printed += 1
    recipes = {row.recipe for table in TABLES for row in table.rows if row.recipe}
    said = "\n".join(line for lines in lacking.values() for line in lines)
    assert all(re.search(rf"`ripple train {recipe}[ `]", said) for recipe in recipes)
    assert printed > len(recipes)
    for command in operator_commands(growing=True):
        assert command in said


def test_everything_is_written_and_not_empty(tmp_path, results):
    jsd = [
        {"kind": "ripples", "step": n, "epoch": n / 10, "loss": 4.0, "jsd": 0.05 + n / 1000,
         "halting_group": 4.5, "jsd/layer_0": 0.02, "jsd/layer_1": 0.03}
        for n in range(1, 21)
    ]  # fmt: skip
    curves = [
        model(system, 1e8 / tokens**power, tokens, 4, embed_dim=96, peak_mb=tokens**power / 1e3)
        for power, system in ((2, "DeiT, softmax SDPA"), (1, "ripple, R_max 4"))
        for tokens in (256, 1024, 4096)
    ]
    naive = {"system": "ripple, all pairs in PyTorch operations"}
    curves += [row | naive for row in curves[:2]]
    nothing = {"median_ms": None, "images_per_second": None, "peak_mb": None}
    curves.append(curves[2] | naive | nothing | {"status": "does not fit"})
    wide = [model("ripple, dense", 100.0, tokens, 4) for tokens in (256, 1024)]
    results([run("cifar100-ripple-tiny", 73.0, 100)], jsd, curves, wide)
    output, shown = tmp_path / "out", StringIO()
    lacking = reproduce(["all"], output, Console(file=shown, width=200), tmp_path / "results")
    assert list(lacking) == list(catalogue())
    for name in catalogue():
        assert (output / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (output / f"{name}.svg").read_text()[:2000]
        assert f"({name}.png)" in (output / f"{name}.md").read_text()
        assert name in shown.getvalue()
    assert len(list(output.iterdir())) == 3 * len(catalogue())
    assert not lacking["figure-jsd"]
    page = (output / "figure-jsd.md").read_text()
    assert "| `folder 1/any name.csv` | 2 | 0.0510 | 0.0700 | 0.0700 |" in page
    assert f"{uniform_divergence(5):.4f} for 5 groups" in page
    page = (output / "figure-speed.md").read_text()
    assert "| DeiT (softmax) | 2.6 ms, 65.5 MB | 41.9 ms" in page and "departs" not in page
    assert "forward, DeiT-LA (linear), ripple (DP): not yet run" in page
    assert re.search(r"\| ripple \(naïve\) \| .* MB \| .* MB \| does not fit \|", page)
    assert "training step, all lines: not yet run" in page and "| training step |" not in page
    page = (output / "figure-speed-partitions.md").read_text()
    assert "logarithmic, dense: not yet run" in page
    assert "73.0 (100 epochs)" in (output / "table2.md").read_text()


def test_words_beside_dots_do_not_cover_each_other(monkeypatch, tmp_path, results):
    changed = "optimizer.decay_feature_maps: True → False"
    tops = {"deit-la": 40.0, "convit": 55.0, "ripple": 57.0}
    short = [run(f"cifar100-short-{name}-tiny", top1, 60) for name, top1 in tops.items()]
    found = results([run("cifar100-ripple-tiny", 75.0, changes=changed), *short])
    figures = []
    monkeypatch.setattr(charts, "save_both", lambda figure, path: figures.append(figure))
    charts.draw_table(BY_NAME["table2"], fill(BY_NAME["table2"], found), tmp_path)
    figures[0].canvas.draw()
    words = [text for text in figures[0].axes[0].texts if "epochs" in text.get_text()]
    assert len(words) == 4
    for one, other in itertools.combinations(words, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent())


def test_runs_of_both_starts_come_first_in_the_figure_on_divergence(results):
    def metrics(epochs, jsd):
        row = {"kind": "ripples", "step": 1, "loss": 4.0, "groups": 5}
        return [row | {"epoch": e, "jsd": jsd + e / 1000} for e in range(epochs + 1)]

    lengths = {"uniform": (60, 0.077), "longer": (100, 0.077), "plain": (35, 0.0)}
    found = results(*(metrics(*length) for length in lengths.values()))
    assert [int(name.split()[1][0]) for name in divergence_runs(found)] == [1, 2, 0]


def test_one_name_is_also_printed(tmp_path, results):
    results([run("cifar100-ripple-tiny", 73.0)])
    shown = StringIO()
    console = Console(file=shown, width=40)
    reproduce(["table6", "table6"], tmp_path / "out", console, tmp_path / "results")
    assert "# Table 6" in shown.getvalue()
    assert "| RFA | no | 67.10 | not yet run |" in shown.getvalue()
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"table6"}


def test_names_are_listed_and_unknown_ones_suggest_the_nearest():
    shown = StringIO()
    list_all(Console(file=shown, width=100))
    assert all(name in shown.getvalue() for name in (*catalogue(), "all"))
    assert find_names(["all", "table1"]) == list(catalogue())
    with pytest.raises(ValueError, match="no table or figure 'tabel2': did you mean table2"):
        find_names(["table1", "tabel2"])


def test_divergence_is_that_of_its_definition():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)

    def kullback(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x)

    for row, value in zip(p.tolist(), jensen_shannon(p, q).tolist(), strict=True):
        middle = [(a + b) / 2 for a, b in zip(row, q.tolist(), strict=True)]
        expected = (kullback(row, middle) + kullback(q.tolist(), middle)) / 2
        assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(jensen_shannon(p.T, q[:, None], dim=0), jensen_shannon(q, p))
    apart = jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert float(apart) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match=r"same groups.*got shapes \(3, 3\) and \(2,\)"):
        jensen_shannon(p, q[:2])


def test_fixed_weights_have_no_divergence_and_uniform_ones_that_of_the_line():
    fixed = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert float(divergence_from_fixed(fixed)) == pytest.approx(0, abs=1e-7)
    uniform = torch.full((2, 3, 5), 0.2, dtype=torch.bfloat16)
    torch.testing.assert_close(
        divergence_from_fixed(uniform),
        torch.full((2, 3), uniform_divergence(5)),
        atol=1e-3,
        rtol=0,
    )
    assert uniform_divergence(2) == 0.0  # 1/2, 1/2
    assert 0 < uniform_divergence(3) < uniform_divergence(9) < math.log(2)


def test_a_readmes_section_is_replaced_by_what_the_files_say(tmp_path, results):
    results([run("cifar100-ripple-tiny", 73.0, 100), run("cifar100-ripple-tiny-fixed", 70.0)])
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{readme.BEGIN}\nwas here\n{readme.END}\n\nMore.\n")
    readme.write_section(path, tmp_path / "results")
    text = path.read_text()
    assert text.startswith(f"# Title\n\n{readme.BEGIN}\n\n**Table 2")
    assert text.endswith(f"{readme.END}\n\nMore.\n") and "was here" not in text
    assert "| ripple | 73.94 | 73.0 (100 epochs) | 92.37 | 93.0 (100 epochs) |" in text
    assert "| fixed | yes | yes | 4 | 71.34 | 70.0 |" in text
    assert "[folder 0/any name.csv](<benchmarks/results/folder 0/any name.csv>)" in text
    assert "Table 8" not in text  # all of it was shown before
    assert "not yet run" not in text
    readme.write_section(path, tmp_path / "results")
    assert path.read_text() == text
    with pytest.raises(ValueError, match="stands between two lines"):
        readme.replace_section("# Title", "section")


def test_the_readmes_section_is_that_of_the_files():
    text = (ROOT / "README.md").read_text()
    if readme.BEGIN not in text:
        pytest.skip("README.md has no section of results yet")
    section = readme.results_section(read_results(ROOT / "benchmarks/results"))
    assert readme.replace_section(text, section) == text


def test_the_repositorys_own_results_are_found():
    found = read_results(ROOT / "benchmarks/results")
    rows = list(csv.DictReader((ROOT / "benchmarks/results/stability-nvidia-h200.csv").open()))
    seeds = [float(row["top1"]) for row in rows if row["recipe"] == "cifar100-20-ripple-tiny"]
    assert seeds
    value = ours("table2", "top1", "ripple", found)
    assert isinstance(value, Measured)
    assert int(value.departs[0].split()[0] if value.departs else 300) >= 20
    table = BY_NAME["table2"]
    assert value.text(1) in grid(table, fill(table, found))
    found.runs.clear()
    expected = "ripple: not yet run: `ripple train cifar100-ripple-tiny`"
    assert expected in missing(table, fill(table, found))
