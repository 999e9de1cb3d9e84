"""The README's code runs as it is printed, and its links lead somewhere."""

import csv
import math
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
import timm

import ripple_attention.models  # noqa: F401  (makes the names known to timm)
from ripple_attention import paper
from ripple_attention.bench.op import markdown_table, read_csv
from ripple_attention.feature_maps import Learned
from ripple_attention.recipes import all_recipes, find_recipe
from ripple_attention.train import commands
from ripple_attention.train.module import learning_rate

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/algorithm.md",
    "docs/training.md",
    "docs/performance.md",
]


def test_the_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 64, 64, 6, 32)
    assert names["y"].shape == (2, 14, 14, 192)
    assert names["weights"].shape[-1] == 5


def test_the_readmes_numbers_are_those_of_the_results_file():
    results = ROOT / "benchmarks/results/op-amd-epyc-2-threads-float32.csv"
    assert markdown_table(read_csv(results)) in (ROOT / "README.md").read_text()


def test_the_demos_figure_is_that_of_the_results_file():
    (row,) = csv.DictReader((ROOT / "benchmarks/results/digits-amd-epyc-2-threads.csv").open())
    assert f"{float(row['top1']):.1f} % top-1" in all_recipes()["digits"].text
    assert row["changes"] == ""


def test_the_figures_of_shapes_are_those_of_the_results_file():
    *_, last = (
        row
        for row in read_results("shapes-smca-ripple-amd-epyc-1-threads.csv")
        if row["kind"] == "evaluation"
    )
    figures = f"AP {float(last['ap']):.3f}, AP50 {float(last['ap50']):.3f}"
    assert figures in all_recipes()["shapes-smca-ripple"].text
    assert last["step"] == "1200"


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_figures_of_training_are_those_of_the_results_file(page):
    text = (ROOT / page).read_text()
    rows = list(csv.DictReader((ROOT / "benchmarks/results/stability-nvidia-h200.csv").open()))
    for system in ("deit", "deit-la", "ripple"):
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{system}-tiny"]
        top1, largest = (
            ", ".join(f"{float(row[name]):.1f}" for row in runs)
            for name in ("top1", "gradient_norm_max")
        )
        assert re.search(rf"\| {top1} \|.* {largest} \|", text)


def read_results(name):
    return list(csv.DictReader((ROOT / "benchmarks/results" / name).open()))


def test_other_figures_of_training_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text().replace("\n", " ")
    linear, ripple = read_results("stability-lr-5e-4-nvidia-h200.csv")
    (speed,) = read_results("training-speed-nvidia-h200.csv")
    assert "lr: 0.001 → 0.0005; epochs: 20 → 10" in linear["changes"]
    first, second = (float(run["top1"]) for run in (linear, ripple))
    assert f"{first:.1f} % (DeiT-LA) and {second:.1f} % (ripple)" in text
    first, second = (float(run["gradient_norm_max"]) for run in (linear, ripple))
    assert f"largest norms of {first:.1f} and {second:.1f}" in text
    assert f"{float(speed['images_per_second']):,.0f} images/s" in text


def by_system(rows, tokens, step):
    found = [row for row in rows if (row["tokens"], row["pass"]) == (tokens, step)]
    return {row["system"]: row for row in found if row["status"] == "ok"}


def operator_lines():
    """The table of `docs/performance.md`, and how many times as long softmax takes forward."""
    lines, factors = [], []
    for file in ("op-nvidia-h200-bfloat16-batch-64.csv", "op-nvidia-h200-bfloat16.csv"):
        rows = read_results(file)
        for tokens in dict.fromkeys(row["tokens"] for row in rows):
            for step in ("forward", "forward+backward"):
                found = by_system(rows, tokens, step)
                times = {name: float(row["median_ms"]) for name, row in found.items()}
                ours = times["ripple tiled triton"]
                names = "softmax SDPA", "linear attention", "ripple table"
                ratios = [times[name] / ours for name in names]
                assert min(ratios[1:]) > 1
                longer = [f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in ratios]
                cells = [f"{int(tokens):,} ({rows[0]['batch']})", step.replace("+", " and ")]
                cells += [f"{ours:.3f}", f"{ours / times['floor: a copy of the same bytes']:.2f}"]
                lines.append(f"| {' | '.join([*cells, *(f'{x} ×' for x in longer)])} |")
                factors += [longer[0]] if step == "forward" else []
    return lines, factors


def model_lines():
    rows, lines = read_results("model-nvidia-h200-bfloat16.csv"), []
    names = "ripple, R_max 4", "DeiT, softmax SDPA", "DeiT-LA in PyTorch operations"
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        for step in ("forward", "training step"):
            found = by_system(rows, tokens, step)
            ours, *theirs = (float(found[name]["median_ms"]) for name in names)
            called = [f"{float(found[name]['as_called_ms']):.1f}" for name in names[:2]]
            batch = found[names[0]]["batch"]
            cells = [f"{int(tokens):,} ({batch})", step, f"{ours:.1f}"]
            cells += [f"{x / ours:.2f} ×" for x in theirs]
            lines.append(f"| {' | '.join([*cells, *called])} |")
    return lines


def partition_lines():
    rows, lines = read_results("model-nvidia-h200-bfloat16.csv"), []
    names = "R_max 2", "R_max 4", "R_max 8", "R_max 16", "logarithmic", "dense"
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        for step in ("forward", "training step"):
            found = by_system(rows, tokens, step)
            times = [f"{float(found[f'ripple, {name}']['median_ms']):.1f}" for name in names]
            batch = found["ripple, dense"]["batch"]
            lines.append(f"| {int(tokens):,} ({batch}) | {step} | {' | '.join(times)} |")
    return lines


def test_figures_of_speed_are_those_of_their_files():
    text = (ROOT / "docs/performance.md").read_text()
    lines, factors = operator_lines()
    for line in (*lines, *model_lines(), *partition_lines()):
        assert line in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    claim = f"{', '.join(factors[:-1])} and {factors[-1]} times as fast as PyTorch's softmax"
    assert claim in readme
    versions = re.findall(
        r"^\| (\d [^|]+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+?) \|$", text, re.M
    )
    columns = ("forward", 65536), ("query_gradient", 65536), ("key_gradient", 65536)
    columns += (("key_gradient", 196),)
    assert len(versions) == 6
    rows = read_results("tuning-nvidia-h200.csv")
    for version, *printed in versions:
        for number, (kernel, tokens) in zip(printed, columns, strict=True):
            chosen = [
                float(row["microseconds"])
                for row in rows
                if (row["version"], row["kernel"]) == (version, kernel)
                and (row["tokens"], row["head_dim"]) == (str(tokens), "32")
            ]
            assert number == (str(min(chosen)) if chosen else "–")


def test_the_last_versions_of_the_tuning_log_are_of_their_files():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    found = {}
    for row in read_results("slabs-nvidia-h200.csv"):
        key = row["version"].split()[0], row["tokens"], row["batch"], row["max_registers"]
        found.setdefault((*key, row["tiles_of_a_strip"], row["note"]), row["microseconds"])

    def keys(registers, tokens="256", batch="392", kind="two tiles at a time"):
        return found["14", tokens, batch, registers, "", f"first machine: {kind}"]

    assert f"Came {float(keys('128', kind='a tile at a time')):.0f}: now shared memory" in text
    assert f"1,245 instructions: {keys('255')} µs with 255 registers" in text
    spilled = f"({float(keys('224')):.0f} to {float(keys('168')):.0f} µs)"
    assert (
        f"with fewer they spill {spilled}. 196 tokens, batch 512: {keys('255', '196', '512')}"
        in text
    )

    def sums(registers, when):
        return found["14", "4096", "4", registers, "1", f"first machine: sums are copied {when}"]

    before, after = sums("96", "after the window is met"), sums("96", "with the window")
    assert f"came −{float(before) - float(after):.1f} ({after} instead of {before})" in text
    assert f"wait less for their windows: {sums('128', 'with the window')}." in text
    note = "second machine: and no rows that nobody sees, queries before sums"
    sizes = ("4096", "1"), ("16384", "4"), ("65536", "8")
    small, large, largest = (found["15", t, "4", "128", tiles, note] for t, tiles in sizes)
    last = (
        f"{float(small):.1f} µs at 4,096 tokens, {float(large):.1f} at 16,384, {float(largest):.1f}"
    )
    assert f"{last} at 65,536." in text
    steps = [
        row
        for row in read_results("timeline-steps-nvidia-h200.csv")
        if row["to"] == "the window is there"
    ]
    waits = [float(x) for name, x in steps[0].items() if name.startswith(("mean", "of_"))]
    assert f"waits {round(min(waits), 1)} to {max(waits):.1f} µs for its window" in text


def test_launches_cost_what_the_file_says():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    times = {
        (row["system"], row["pass"], row["compile_mode"]): f"{float(row['steps_in_a_row_ms']):.1f}"
        for row in read_results("graphs-nvidia-h200.csv")
    }

    def both(system, step):
        modes = ("reduce-overhead", "default")
        return (times[system, step, mode] for mode in modes)

    ours, theirs = "ripple, R_max 4", "DeiT, softmax SDPA"
    with_graphs, without = both(ours, "training step")
    assert f"in a row took {with_graphs} ms so and {without} without" in text
    assert "(DeiT: {} and {})".format(*both(theirs, "training step")) in text
    assert "forward passes {} and {}".format(*both(ours, "forward")) in text
    assert "({} and {})".format(*both(theirs, "forward")) in text


def test_what_passed_on_a_gpu_is_in_files():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    cases = read_results("random-cases-nvidia-h200.csv")
    passed = [row["kernels"] for row in cases if row["passed"] == "True"]
    assert len(cases) == 1000 and f"[{len(passed)} passed](" in text
    tables = sum(row["kernels"] == "table_triton" for row in cases)
    assert passed.count("table_triton") == tables and f"All {tables} cases of tables pass." in text
    tests = read_results("tests-nvidia-h200.csv")
    whole, _, front = tests[-3:]
    assert whole["tests of make test-gpu"].startswith("all but the random cases")
    for row, words in (
        (whole, "were {} tests, of which {} passed in one run"),
        (front, "Of the {} of front, sums and fused layers, run again with tests added since, {} "),
    ):
        count = int(row["passed"]) + int(row["failed"])
        assert words.format(count, row["passed"]) in text
    errors = {"yes": [], "no": []}
    for row in read_results("reach-8-nvidia-h200.csv"):
        errors[row["vectors_with_promises"]].append(float(row["error_of_output"]))
    wrong = [100 * x for x in errors["yes"] if x > 0.01]
    assert f"[errors of {min(wrong):.0f} to {max(wrong):.0f} %](" in text
    assert max(errors["no"]) < 0.002
    kernels = read_results("promises-sm90.csv")
    assert all(row["sha1_with_promises"] == row["sha1_without"] for row in kernels)
    one_hot = read_results("odd-widths-one-hot-nvidia-h200.csv")
    wrong = [row for row in one_hot if float(row["share_of_wrong_products_with_the_far_sum"]) > 0]
    first = min(int(row["value_channel"]) for row in wrong)
    assert f"is wrong from the {first}th value channel on" in text
    assert not any(row["tiles_of_the_query_gradients"] == "as chosen now" for row in wrong)
    for row in read_results("odd-widths-nvidia-h200.csv"):
        if row["tiles_of_the_query_gradients"] == "as chosen now":
            assert max(float(x) for name, x in row.items() if name.startswith("error")) < 5e-3


def test_the_front_in_one_launch_is_as_timed():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    rows = read_results("front-one-launch-nvidia-h200.csv")

    def times(front, run="2", **settings):
        found = [row for row in rows if row["front"] == front and row["run"] == run]
        found = [row for row in found if settings.items() <= row.items()]
        return {row["tokens"]: float(row["forward_us"]) for row in found}

    roles = "one launch, three roles"
    chosen = {"tokens_of_sticks_at_once": "64", "most_registers": "80"}
    before = times("three launches")
    capped = times(roles, **chosen, programs_per_multiprocessor="6")
    at_first = {"tokens_of_sticks_at_once": "64", "programs_per_multiprocessor": "6"}
    first, other = times(roles, "1", **at_first), times("three launches", "1")
    assert f"{first['256']} µs instead of {before['256']} at 256 tokens" in text
    assert f"and {first['4096']} instead of {other['4096']} at 4,096" in text
    assert capped["256"] == first["256"]
    assert f"4,096 level ({capped['4096']} instead of {before['4096']})" in text
    in_turn = [
        float(row["forward_us"])
        for row in rows
        if row["front"].endswith("in turn") and row["tokens"] == "256"
    ]
    assert f"does all in turn takes {min(in_turn)} to {max(in_turn)} at 256 tokens" in text
    now = times(f"{roles}, a block loaded ahead", **chosen, programs_per_multiprocessor="12")
    listed = "{} µs at 256 tokens, {} at 4,096 and {} at 16,384".format(*now.values())
    saved = sorted(round(100 * (1 - now[tokens] / before[tokens])) for tokens in now)
    assert f"{listed}, {saved[0]} to {saved[-1]} % less" in text


def test_sticks_in_a_launch_of_their_own_are_as_timed():
    pytest.importorskip("triton")
    from ripple_attention.ops.front_triton import PROGRAMS, STICKS_TOGETHER

    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    plan = {"tokens_at_once": "64", "warps": "4"}
    together = plan | {"sticks_are_broken": "with the maps", "most_registers": "80"}
    apart = plan | {"sticks_are_broken": "in a launch of their own"}
    apart |= {"programs_per_multiprocessor": str(PROGRAMS["sticks"])}
    rows = read_results("sticks-nvidia-h200.csv")
    before, after = (
        {int(row["sticks"]): row["front_us"] for row in rows if setting.items() <= row.items()}
        for setting in (together, apart)
    )
    few, many = STICKS_TOGETHER, (5, 8, 16)
    times = [*(after[x] for x in many), *(before[x] for x in many)]
    assert "5, 8 and 16 sticks, {}, {} and {} µs instead of {}, {} and {} ".format(*times) in text
    assert f"with the maps ({before[few]} instead of {after[few]}; " in text
    level = {"sticks": str(few), "tokens_at_once": "32", "warps": "2"}
    (level,) = (row["front_us"] for row in rows if level.items() <= row.items())
    assert f"by 32 tokens and 2 warps they would be level, {level})" in text
    others = [
        min(
            float(row["front_us"])
            for row in rows
            if row["sticks"] == str(x)
            and row["sticks_are_broken"] == "with the maps"
            and row["most_registers"] != "80"
        )
        for x in many
    ]
    assert "other caps: {}, {} and {} at best)".format(*others) in text
    faster = [sticks for sticks in before if float(after[sticks]) < float(before[sticks])]
    assert faster == [sticks for sticks in before if sticks > few]


def test_speeds_of_table_4_are_those_of_their_file():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    rows = read_results("model-table4-side-16.csv")
    assert all(row["compiled"] == "True" for row in rows)
    scatter = {row["system"]: float(row["median_ms"]) - float(row["min_ms"]) for row in rows}
    wide = {name for name, x in scatter.items() if x > 0.02}
    assert wide == {"DeiT-LA", "ripple, R_max 2", "ripple, R_max 4"}
    assert f"{max(scatter.values()):.2f} ms above their minima" in text
    times = {row["system"]: float(row["median_ms"]) for row in rows}
    longer = {name: f"{time / times['DeiT-LA']:.2f}" for name, time in times.items()}
    reaches = [longer[f"ripple, R_max {reach}"] for reach in (2, 4, 8, 16)]
    assert "16 take {}, {}, {} and {} times as long as DeiT-LA".format(*reaches) in text
    assert f"logarithmic groups {longer['ripple, logarithmic']};" in text
    names = "fixed", "truncated", "softmax weights"
    others = (longer[f"ripple, {name}"] for name in names)
    words = "fixed ones take {} times as long, truncated ones {}, softmax ones {}."
    assert words.format(*others) in text


def test_results_of_60_epochs_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text()
    runs = read_results("cifar100-short-nvidia-h200.csv")
    for run in runs:
        top1, top5, norm = (float(run[x]) for x in ("top1", "top5", "gradient_norm_max"))
        # To the next tenth from the half on, as a person rounds.
        shown = (str(Decimal(str(x)).quantize(Decimal("0.1"), ROUND_HALF_UP)) for x in (top1, top5))
        top1, top5 = shown
        assert f"| `{run['recipe']}` | {top1} | {top5} | {norm:.1f} |" in text
        assert f"{top1} % top-1, {top5} % top-5 (seed 0)" in all_recipes()[run["recipe"]].text
    top1 = {run["recipe"].removeprefix("cifar100-short-"): float(run["top1"]) for run in runs}
    ripple = top1["ripple-tiny"]
    flowing = " ".join(text.split())
    assert f"Ripple is {ripple - top1['deit-la-tiny']:.1f} points above DeiT-LA" in flowing
    assert f"and {ripple - top1['deit-tiny']:.1f} above DeiT" in flowing
    assert f"worth {ripple - top1['ripple-tiny-fixed']:.1f} points against" in flowing
    assert f"DeiT-LA is {top1['deit-tiny'] - top1['deit-la-tiny']:.1f} points behind" in flowing
    assert top1["ripple-tiny4"] > top1["deit-la-tiny"]
    kinds = "", "-fixed", "-logarithmic", "-truncated"
    theirs = {x: paper.ACCURACY[f"cifar100-ripple-tiny{x}"][0] for x in kinds}
    assert f"against fixed ones ({theirs[''] - theirs['-fixed']:.1f} there)" in flowing
    leads = {
        "DeiT-LA": (theirs[""] - paper.ACCURACY["cifar100-deit-la-tiny"][0], top1["deit-la-tiny"]),
        "DeiT": (theirs[""] - paper.ACCURACY["cifar100-deit-tiny"][0], top1["deit-tiny"]),
        "fixed ones": (theirs[""] - theirs["-fixed"], top1["ripple-tiny-fixed"]),
    }
    for other, (lead, ours) in leads.items():
        assert re.search(rf"\| \w.* {lead:.1f} .*above {other} \| {ripple - ours:.1f}\b", text)
    lost = ripple - top1["ripple-tiny-logarithmic"], theirs[""] - theirs["-logarithmic"]
    assert "cost {:.1f} ({:.1f} there)".format(*lost) in flowing
    near = ripple - top1["ripple-tiny-truncated"], theirs[""] - theirs["-truncated"]
    assert "beyond R_max costs {:.2f} ({:.2f} there)".format(*near) in flowing
    layers = {}
    for row in read_results("strength-cifar100-short-ripple-tiny.csv"):
        values = float(row["strength"]), float(row["share_below_half"])
        layers.setdefault(row["layer"], []).append(values)
    means = [[statistics.mean(x) for x in zip(*heads, strict=True)] for heads in layers.values()]
    columns = zip(*means, strict=True)
    strong, weak = ([f"{100 * x:.0f}" for x in sorted(column)] for column in columns)
    assert f"It leaves {strong[0]} to {strong[-1]} % of the attention" in flowing
    assert f"less than half of it for {weak[0]} to {weak[-1]} % of the tokens" in flowing


def test_results_of_100_epochs_are_those_of_their_files():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    runs = {
        run["recipe"]: run["top1"] for run in read_results("cifar100-100-epochs-nvidia-h200.csv")
    }
    deit, ripple = (Decimal(runs[f"cifar100-short-{name}-tiny"]) for name in ("deit", "ripple"))
    gap = f"reaches {deit:.1f} % top-1 and ripple {ripple:.1f}, {ripple - deit:.1f} points above"
    assert gap in flowing
    folder = "cifar100-100-epochs-nvidia-h200"
    curves = [
        {round(float(row["epoch"])): float(row["top1"]) for row in rows if row["top1"]}
        for rows in (read_results(f"{folder}/{name}.csv") for name in ("deit", "ripple"))
    ]
    leads = {epoch: curves[1][epoch] - curves[0][epoch] for epoch in curves[0]}
    assert f"leads by {leads[25]:.1f} points at epoch 25" in flowing and "by 2 to 4 from" in flowing
    assert all(2 <= lead <= 4 for epoch, lead in leads.items() if epoch >= 35)
    layers = {}
    for row in read_results("strength-cifar100-100-epochs-ripple-tiny.csv"):
        shares = [float(row[f"active_features_of_{x}"]) for x in ("queries", "keys")]
        layers.setdefault(row["layer"], []).append(shares)
    means = [[100 * statistics.mean(x) for x in zip(*it, strict=True)] for it in layers.values()]
    of_query, of_key = (f"{min(x):.0f} to {max(x):.0f} %" for x in zip(*means, strict=True))
    assert f"{of_query} of a query's and {of_key} of a key's" in flowing


def test_dead_features_are_those_of_their_files():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    of_layers, of_heads = [], []
    for name in ("short", "100-epochs"):
        rows = read_results(f"strength-cifar100-{name}-ripple-tiny.csv")
        layers = {row["layer"]: 100 * float(row["dead_features_of_all_heads"]) for row in rows}
        of_layers.append(list(layers.values()))
        of_heads.append(statistics.mean(100 * float(row["dead_features"]) for row in rows))
    first, last = (f"{statistics.mean(x):.0f} %" for x in of_layers)
    bounds = f"{min(of_layers[1]):.0f} to {max(of_layers[1]):.0f} % by layer"
    assert f"{first} are so in the mean after 60 epochs" in flowing
    assert f"and {last} after 100, {bounds}" in flowing
    assert f"within a head, {of_heads[0]:.0f} and {of_heads[1]:.0f} % are zero" in flowing


def test_shrunk_maps_are_those_of_their_file():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    rows = read_results("shrunk-feature-maps.csv")
    found = {(r["epochs"], r["factor_on_w1"], r["factor_on_w2"]): r for r in rows}
    trained = [found[x, "1", "1"] for x in ("60", "100")]
    sizes = [float(x["standard_deviation_of_w1"]) for x in trained]
    assert f"it is at {sizes[0]:.2f} and {sizes[1]:.2f}" in flowing
    spec = all_recipes()["cifar100-short-ripple-tiny"].recipe.optimizer
    kept = {}
    for epochs in (60, 100):
        rates = (learning_rate(step, 97, epochs, spec) for step in range(97 * epochs))
        kept[epochs] = math.prod(1 - rate * spec.weight_decay for rate in rates)
    words = f"take it to {kept[60]:.2f} of its start in 60 epochs and to {kept[100]:.2f} in 100"
    assert words in flowing and f"times {kept[100] / kept[60]:.3f}, which is" in flowing
    dead = "dead_features_of_all_heads_percent"
    of_w1, of_w2 = found["60", "0.907", "1"][dead], found["60", "1", "0.907"][dead]
    now, later = (x[dead] for x in trained)
    assert f"{of_w1} % of a layer's features are dead in all heads instead of {now}" in flowing
    assert f"has ({later}); the same factor on W₂ gives {of_w2}" in flowing
    taken_back = [row for row in rows if float(row["factor_on_w1"]) > 1]
    assert len(taken_back) == 2 and all(float(row[dead]) == 0 for row in taken_back)


def test_trials_are_those_of_their_file():
    text = (ROOT / "docs/training.md").read_text()
    rows = read_results("trials-cifar100-short-nvidia-h200.csv")
    lasts = {(row["recipe"], row["options"]): row for row in rows}
    trials = [key for key in lasts if key[1]]
    assert len(trials) == 6
    for recipe, options in trials:
        last, plain = lasts[recipe, options], lasts[recipe, ""]
        assert last["epoch"] == plain["epoch"]
        words = " ".join(f"--{x.replace(':', '')}" for x in options.split("; "))
        pairs = [
            ", ".join(
                str(Decimal(row[name]).quantize(Decimal(unit), ROUND_HALF_UP))
                for row in (plain, last)
            )
            for name, unit in (("mean_loss_of_5_epochs", "0.001"), ("top1", "0.1"))
        ]
        cells = [f"`{recipe}`", f"`{words}`", last["epoch"], *pairs]
        assert f"| {' | '.join(cells)} |" in text


def test_the_trial_of_embeddings_is_that_of_its_file():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    found = {
        (row["standard_deviation_of_stick_embeddings"], int(row["epoch"])): row
        for row in read_results("trial-embeddings-nvidia-h200.csv")
        if row["epochs"] == "60"
    }
    cut = {
        row["standard_deviation_of_stick_embeddings"]: row
        for row in read_results("trial-embeddings-nvidia-h200.csv")
        if (row["epochs"], row["epoch"]) == ("100", "45")
    }
    ahead = float(cut["1"]["top1"]) - float(cut["0.02"]["top1"])
    assert f"cut off at epoch 45, {ahead:.1f} points ahead with the same loss" in flowing
    losses = (float(row["mean_loss_of_5_epochs"]) for row in cut.values())
    assert abs(next(losses) - next(losses)) < 0.001
    early, later = (f"{float(found['1', epoch]['jsd']):.2f}" for epoch in (5, 20))
    assert f"the divergence is {early} after five epochs and {later} after 20" in flowing
    lead = [
        float(found["0.02", epoch]["mean_loss_of_5_epochs"])
        - float(found["1", epoch]["mean_loss_of_5_epochs"])
        for epoch in (20, 40)
    ]
    assert f"the training loss is {lead[0]:.2f} lower there" in flowing and abs(lead[1]) < 0.005
    shown = (
        Decimal(found[x, 60]["top1"]).quantize(Decimal("0.1"), ROUND_HALF_UP) for x in ("1", "0.02")
    )
    assert "60 epochs give {} % instead of {}".format(*shown) in flowing


def test_the_trial_without_decay_is_that_of_its_file():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    rows = read_results("trial-no-decay-nvidia-h200.csv")
    found = {
        (row["recipe"], row["epochs"], int(row["epoch"]), row["decay_of_feature_maps"]): row["top1"]
        for row in rows
    }
    for row in read_results("cifar100-short-nvidia-h200.csv"):
        assert found.get((row["recipe"], "60", 60, "yes"), row["top1"]) == row["top1"]

    def shown(model):
        key = f"cifar100-short-{model}", "60", 60
        numbers = (Decimal(found[*key, decay]) for decay in ("no", "yes"))
        return tuple(x.quantize(Decimal("0.1"), ROUND_HALF_UP) for x in numbers)

    assert (
        "60 epochs give {} % top-1 for ripple instead of {}".format(*shown("ripple-tiny"))
        in flowing
    )
    assert "and {} for DeiT-LA instead of {}".format(*shown("deit-la-tiny")) in flowing
    key = "cifar100-short-ripple-tiny", "100"
    epochs = sorted({int(row["epoch"]) for row in rows if row["epochs"] == "100"})
    ahead = [Decimal(found[*key, e, "no"]) - Decimal(found[*key, e, "yes"]) for e in epochs]
    least, most = (x.quantize(Decimal("0.1"), ROUND_HALF_UP) for x in (min(ahead), max(ahead)))
    words = (
        f"{least} to {most} points ahead of that with decay at epochs {epochs[0]} to {epochs[-1]}"
    )
    assert words in flowing


def losses_of(folder, name):
    """The mean training loss over the five epochs before each evaluation, by epoch."""
    rows = read_results(f"{folder}/{name}.csv")
    steps = [(float(row["epoch"]), float(row["loss"])) for row in rows if row["loss"]]
    ends = [round(float(row["epoch"])) for row in rows if row["top1"]]
    return {end: statistics.mean(x for epoch, x in steps if end - 5 < epoch <= end) for end in ends}


def test_the_trial_of_the_papers_rate_is_that_of_its_file():
    flowing = " ".join((ROOT / "docs/training.md").read_text().split())
    rows = {
        (row["recipe"].removeprefix("cifar100-short-"), row["learning_rate"], row["epoch"]): row
        for row in read_results("trial-lr-5e-4-nvidia-h200.csv")
    }
    losses, tops = {}, {}
    for name in ("deit-tiny", "ripple-tiny"):
        both = [rows[name, rate, "30"] for rate in ("0.0005", "0.001")]
        losses[name] = tuple(f"{float(row['mean_loss_of_5_epochs']):.3f}" for row in both)
        tops[name] = [Decimal(row["top1"]) for row in both]
    assert "that of 1e-3, {} and {} over".format(*losses["deit-tiny"]) in flowing
    assert "is higher, {} and {}:".format(*losses["ripple-tiny"]) in flowing
    leads = [f"{r - d:.1f}" for r, d in zip(tops["ripple-tiny"], tops["deit-tiny"], strict=True)]
    assert "leads by {} points at epoch 30 instead of {}".format(*leads) in flowing


def test_leads_over_deit_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text()
    flowing = " ".join(text.split())
    runs = {row["recipe"]: row for row in read_results("cifar100-light-nvidia-h200.csv")}
    for recipe, row in runs.items():
        shown = (f"{float(row[x]):.1f}" for x in ("top1", "top5", "gradient_norm_max"))
        assert f"| `{recipe} --epochs 60` | {' | '.join(shown)} |" in text

    def leads(file, prefix):
        tops = {}
        for row in read_results(file):
            tops.setdefault(row["recipe"].removeprefix(prefix), []).append(float(row["top1"]))
        means = {name: statistics.mean(x) for name, x in tops.items()}
        deit = means["deit-tiny"]
        of_la = means.get("deit-la-tiny")
        la = "–" if of_la is None else f"{of_la - deit:.1f}".replace("-", "−")
        return f"| {deit:.1f} | {means['ripple-tiny'] - deit:.1f} | {la} |", means

    light, means = leads("cifar100-light-nvidia-h200.csv", "cifar100-20-")
    above = means["ripple-tiny"] - means["deit-la-tiny"]
    assert f"Ripple is {above:.1f} points above DeiT-LA there" in flowing
    short, before = leads("cifar100-short-nvidia-h200.csv", "cifar100-short-")
    gains = [round(means[name] - before[name]) for name in means]
    assert f"reach {min(gains)} to {max(gains)} points more than above" in flowing
    convit = before["convit-tiny"]
    assert f"leads DeiT by {convit - before['deit-tiny']:.1f} points in 60 epochs" in flowing
    assert f"ripple is {before['ripple-tiny'] - convit:.1f} points above ConViT" in flowing
    stable, _ = leads("stability-nvidia-h200.csv", "cifar100-20-")
    longer, _ = leads("cifar100-100-epochs-nvidia-h200.csv", "cifar100-short-")
    assert f"light augmentation, 20 epochs, three seeds {stable}" in flowing
    assert f"the paper's, 60 epochs {short}" in flowing
    assert f"the paper's, 100 epochs {longer}" in flowing
    assert f"light augmentation, 60 epochs {light}" in flowing
    theirs = {
        name: Decimal(str(paper.ACCURACY[f"cifar100-{name}-tiny"][0]))
        for name in ("deit", "deit-la", "convit", "ripple")
    }
    deit = theirs["deit"]
    of_la = f"{theirs['deit-la'] - deit:.1f}".replace("-", "−")
    row = f"the paper, 300 epochs | {deit:.1f} | {theirs['ripple'] - deit:.1f} | {of_la} |"
    assert row in flowing and f"the paper's {deit:.1f} %" in flowing
    assert f"({theirs['convit'] - deit:.1f} in the paper)" in flowing
    assert f"({theirs['convit'] - theirs['ripple']:.1f} below it in the paper)" in flowing
    of_deit, of_la, of_ripple = (
        losses_of("cifar100-light-nvidia-h200", name) for name in ("deit", "la", "ripple")
    )
    behind = {epoch: of_la[epoch] - loss for epoch, loss in of_deit.items()}
    ahead = {epoch: loss - of_ripple[epoch] for epoch, loss in of_deit.items()}
    assert [epoch for epoch in behind if behind[epoch] < 0] == [5, 10, 15]
    assert f"{behind[60]:.2f} above it at the end" in flowing and min(ahead.values()) > 0
    assert f"by {max(ahead.values()):.2f} at most and by {ahead[60]:.2f} at the end" in flowing


def test_class_tokens_and_missing_positions_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text()
    flowing = " ".join(text.split())

    def tops(file):
        names = re.compile(r"cifar100-(?:short-)?(.*?)(?:-no-ape)?$")
        rows = read_results(f"cifar100-{file}-nvidia-h200.csv")
        return {names.match(row["recipe"])[1]: Decimal(row["top1"]) for row in rows}

    mean, token, blind = tops("short"), tops("class-token"), tops("no-ape")
    ripple = mean["ripple-tiny"]
    tenth = Decimal("0.1")
    for system, name in (("DeiT", "deit-tiny"), ("DeiT-LA", "deit-la-tiny")):
        shown = [mean[name], token[name], ripple - mean[name], ripple - token[name]]
        shown = [x.quantize(tenth, ROUND_HALF_UP) for x in shown]
        assert "| {} | {} | {} | {}, {} |".format(system, *shown) in text
    curves = [
        {round(float(row["epoch"])): float(row["top1"]) for row in rows if row["top1"]}
        for rows in (
            read_results(f"cifar100-{folder}-nvidia-h200/deit.csv")
            for folder in ("short", "class-token")
        )
    ]
    behind = {epoch: x - curves[1][epoch] for epoch, x in curves[0].items()}
    assert max(behind, key=behind.get) == 25
    assert f"it is {behind[25]:.1f} points behind at epoch 25, and {behind[60]:.1f} at" in flowing
    for system, name in (("DeiT", "deit"), ("ripple", "ripple")):
        ours = mean[f"{name}-tiny"], blind[f"{name}-tiny"]
        theirs = [paper.ACCURACY[f"cifar100-{name}-tiny{x}"][0] for x in ("", "-no-ape")]
        shown = [x.quantize(tenth, ROUND_HALF_UP) for x in (*ours, ours[0] - ours[1])]
        row = "| {} | {} | {} | {} | {:.1f} |".format(system, *shown, theirs[0] - theirs[1])
        assert row in text
    lead = blind["ripple-tiny"] - blind["deit-tiny"]
    of_paper = [paper.ACCURACY[f"cifar100-{x}-tiny-no-ape"][0] for x in ("ripple", "deit")]
    blind_lead = of_paper[0] - of_paper[1]
    row = f"| ripple {blind_lead:.1f} above DeiT without position embeddings | {lead:.1f} |"
    assert row in text
    words = f"leads by {lead:.1f} points there ({blind_lead:.1f} in the paper)"
    short = ripple - mean["deit-tiny"], ripple - token["deit-tiny"]
    longer = {x["recipe"]: x["top1"] for x in read_results("cifar100-100-epochs-nvidia-h200.csv")}
    names = "cifar100-short-ripple-tiny", "cifar100-short-deit-tiny"
    numbers = *short, Decimal(longer[names[0]]) - Decimal(longer[names[1]])
    shown = "{:.1f}, or {:.1f} if DeiT classifies a class token; {:.1f} in 100 epochs"
    assert f"| {shown.format(*numbers)}; " in text
    assert f"where ripple is {short[1]:.1f} points above it" in flowing
    assert words in flowing and abs(blind["ripple-tiny"] - mean["deit-tiny"]) < tenth


def test_seeds_and_more_features_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text()
    flowing = " ".join(text.split())
    tops = {}
    for file in ("short", "seeds"):
        for row in read_results(f"cifar100-{file}-nvidia-h200.csv"):
            name = row["recipe"].removeprefix("cifar100-short-").removesuffix("-tiny")
            tops.setdefault(name, []).append(float(row["top1"]))
            assert int(row["seed"]) == len(tops[name]) - 1
    means = {name: statistics.mean(x) for name, x in tops.items()}
    for system, name in (("DeiT", "deit"), ("ripple", "ripple")):
        seeds = ", ".join(f"{x:.2f}" for x in tops[name])
        assert f"| {system} | {seeds} | {means[name]:.1f} |" in text
    lead = means["ripple"] - means["deit"]
    assert f"leads by {lead:.1f} points in the mean, and" in flowing
    assert f"; {lead:.1f} in the mean of seeds |" in text
    assert f"best of DeiT's by {min(tops['ripple']) - max(tops['deit']):.1f}." in flowing
    assert max(max(x) - min(x) for x in tops.values()) < 0.5
    assert "which differ by less than half a point" in flowing
    token = read_results("cifar100-class-token-nvidia-h200.csv")[0]
    assert token["recipe"] == "cifar100-short-deit-tiny"
    assert f"the mean leads by {means['ripple'] - float(token['top1']):.1f}." in flowing
    (wide,) = read_results("cifar100-64-features-nvidia-h200.csv")
    assert wide["changes"] == "model.num_features: None → 64"
    both = f"{float(wide['top1']):.1f} % instead of {tops['deit-la'][0]:.1f}"
    assert f"DeiT-LA reaches {both}" in flowing
    folders = "cifar100-64-features-nvidia-h200", "cifar100-short-nvidia-h200"
    losses = [losses_of(folder, "ripple") for folder in folders]
    assert max(losses[0]) == 45
    last = read_results(f"{folders[0]}/ripple.csv")[-1]
    assert f"stopped in epoch {math.ceil(float(last['epoch']))}:" in flowing
    of_maps = []  # numbers a layer, at least and at most, by the counts of table 8
    for name, counts in paper.PARAMETERS.items():
        if "table 8" in counts:
            model = timm.create_model(name, num_classes=100)
            maps = [x for x in model.modules() if isinstance(x, Learned)]
            own = sum(x.numel() for feature_map in maps for x in feature_map.parameters())
            rest = sum(x.numel() for x in model.parameters()) - own
            bounds = (1e6 * (counts["table 8"] + x) - rest for x in (-0.005, 0.005))
            of_maps.append([x / len(maps) / 1e3 for x in bounds])
            assert f"{counts['table 8']:.2f}" in flowing
    least, most = max(x[0] for x in of_maps), min(x[1] for x in of_maps)
    assert f"maps of {least:.1f} to {most:.1f} thousand numbers a layer" in flowing
    assert f"where 32 features make {own / len(maps) / 1e3:.1f} " in flowing
    shown = (f"{x[45]:.3f}" for x in losses)
    assert "before epoch 45 is {}, that of 32 features {}".format(*shown) in flowing
    curves = (
        {round(float(row["epoch"])): float(row["top1"]) for row in rows if row["top1"]}
        for rows in (read_results(f"{folder}/ripple.csv") for folder in folders)
    )
    many, few = (curve[45] for curve in curves)
    assert f"it is {few - many:.1f} points behind there" in flowing


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_commands_of_training_are_understood(page):
    lines = re.findall(r"^    ripple train (\S+)(.*?)(?:  #.*)?$", (ROOT / page).read_text(), re.M)
    assert len(lines) >= 4
    for name, words in lines:
        words = re.sub(r"--(resume|quick|help|output \S+)", "", words).split()
        if name != "--list":
            commands.override(find_recipe(name), words, "ripple train")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_versions_agree():
    import ripple_attention

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {ripple_attention.__version__}\n" in citation
