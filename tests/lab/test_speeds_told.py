"""Every speed that the pages tell of is that of a committed file."""

import re

from results import ROOT, flowing, read_results
from ripple_attention.ops import table


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
    readme = flowing("README.md")
    claim = f"{', '.join(factors[:-1])} and {factors[-1]} times as fast as PyTorch's softmax"
    assert claim in readme
    rows = read_results("model-nvidia-h200-bfloat16.csv")
    speeds = []
    for tokens in ("196", "256", "4096", "16384"):
        found = by_system(rows, tokens, "forward")
        names = "DeiT, softmax SDPA", "ripple, R_max 4"
        deit, ours = (float(found[name]["median_ms"]) for name in names)
        speeds.append(f"{deit / ours:.{2 if deit < ours else 1}f}")
    words = "at {} and {} of DeiT's speed with 196 and 256 tokens, and at {} and {} times it with"
    assert words.format(*speeds) in readme
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
    text = flowing("docs/performance.md")
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
    text = flowing("docs/performance.md")
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
    text = flowing("docs/performance.md")
    cases = read_results("random-cases-nvidia-h200.csv")
    passed = [row["kernels"] for row in cases if row["passed"] == "True"]
    assert len(cases) == 1000 and f"[{len(passed)} passed](" in text
    tables = sum(row["kernels"] == "table_triton" for row in cases)
    assert passed.count("table_triton") == tables and f"All {tables} cases of tables pass." in text
    runs = read_results("tests-nvidia-h200.csv")
    asked = [row["tests of make test-gpu"] for row in runs]
    whole = max(i for i, name in enumerate(asked) if name.startswith("all of make test-gpu"))
    assert runs[whole]["failed"] == "0"
    assert f"All of its {int(runs[whole]['passed']):,} tests passed there in one run" in text
    later = runs[whole + 1 :]
    assert not any(int(row["failed"]) for row in later[1:])
    tables, others, random, more = (int(row["passed"]) for row in later[:4])
    reach = re.search(r"every reach until time was over: (\d+ of )(\d+)$", asked[whole + 4])
    assert f"in a later run {more}, among them {reach[1]}the {reach[2]} of every reach" in text
    assert f"all {tables} tests of tables" in text and f"{others} of other kernels" in text
    assert f"the first {20 * random} random cases" in text
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


def test_the_papers_figure_is_as_timed():
    rows = {
        row["system"].removeprefix("ripple, "): row
        for row in read_results("model-width-96-batch-4.csv")
        if (row["tokens"], row["pass"]) == ("16384", "training step")
    }
    assert all(row["embed_dim"] == "96" and row["batch"] == "4" for row in rows.values())
    names = "R_max 4", "DeiT, softmax SDPA", "tables in PyTorch operations", "DeiT-LA"
    tiled, softmax, tables, linear = (f"{float(rows[x]['median_ms']):.1f}" for x in names)
    text = flowing("docs/performance.md")
    assert f"takes {tiled} ms with R_max 4, {softmax} with softmax and {tables} with tab" in text
    assert f"Linear attention by our own kernels takes {linear}." in text
    fits = rows["all pairs in PyTorch operations"]["status"]
    assert fits == "does not fit" and "all pairs do not fit" in text


def test_the_front_in_one_launch_is_as_timed():
    text = flowing("docs/performance.md")
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


def test_what_many_sticks_spill_and_cost_a_model_is_in_files():
    text = flowing("docs/performance.md")
    spilled = {
        row["sticks"]: row["stack_bytes"]
        for row in read_results("sticks-sm90.csv")
        if row["launch"] == "all"
    }
    words = "four sticks spill {} bytes a thread, five {}, sixteen {};"
    assert words.format(*(spilled[x] for x in ("4", "5", "16"))) in text
    together, apart = (
        f"{float(row['median_ms']):.1f}"
        for row in read_results("sticks-models-nvidia-h200.csv")
        if (row["tokens"], row["system"], row["pass"]) == ("196", "ripple, R_max 16", "forward")
    )
    assert f"at 196 tokens took {together} ms, and takes {apart} with sticks apart" in text
    again = {}
    for row in read_results("sticks-models-nvidia-h200.csv")[-6:]:
        assert row["more_than_four_sticks_are_broken"] == "in a launch of their own"
        again.setdefault(row["tokens"], []).append(f"{float(row['median_ms']):.1f}")
    assert "with 4,096 tokens takes {}, {} and {} ms".format(*again["4096"]) in text
    assert "with 16,384 takes {}, {} and {} ".format(*again["16384"]) in text


def test_speeds_of_table_4_are_those_of_their_file():
    text = flowing("docs/performance.md")
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


def test_tables_are_as_precise_and_as_fast_as_their_files_say():
    rounding = {
        (row["quantity"], row["tokens"]): (float(row["before"]), float(row["now"]))
        for row in read_results("table-rounding.csv")
    }
    told, share = flowing("docs/algorithm.md"), "percent of live queries given 0"
    assert f"{rounding[share, '256x256'][1]:.2f} % of the queries of 256×256 tokens" in told
    largest, mean = (
        rounding[f"{x} similarity {y}", "256x256"][1]
        for x, y in (("largest", "given 0"), ("mean", "of live queries"))
    )
    assert largest < mean / 1000 and "more than a thousandth of the mean" in told
    before, _ = rounding[share, "512x512"]
    assert f"gave 0 for {before:.0f} % of the queries of 512×512" in flowing("CHANGELOG.md")
    units = [now for (name, _), (_, now) in rounding.items() if "units" in name]
    code = (ROOT / "ripple_attention/ops/table.py").read_text()
    assert f"the largest that was seen is {max(units):.1f}" in code and max(units) < table.UNITS
    ratios = [
        sum(float(row[f"{x}_ms_now"]) for x in ("forward", "backward"))
        / sum(float(row[f"{x}_ms_before"]) for x in ("forward", "backward"))
        for row in read_results("table-time-2-cores-float32.csv")
    ]
    least, most = min(ratios), max(ratios)
    assert f"at {least:.1f} to {most:.1f} times the time" in flowing("docs/performance.md")
