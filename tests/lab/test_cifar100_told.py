"""Every result that the page on CIFAR-100 tells of is that of a committed file."""

import math
import re
import statistics
from decimal import Decimal

import timm

import ripple_attention.models  # noqa: F401  (makes the names known to timm)
from results import ROOT, flowing, losses_by_epoch, read_results, rounded, top1_by_epoch
from ripple_attention.feature_maps import Learned
from ripple_lab import paper
from ripple_lab.divergence import uniform_divergence
from ripple_lab.recipes import all_recipes
from ripple_lab.train.checkpoint import EMBEDDED, read_weights
from ripple_lab.train.module import learning_rate


def test_results_of_60_epochs_are_those_of_their_files():
    text = (ROOT / "docs/cifar100.md").read_text()
    runs = read_results("cifar100-short-nvidia-h200.csv")
    for run in runs:
        top1, top5 = rounded(run["top1"]), rounded(run["top5"])
        norm = f"{float(run['gradient_norm_max']):.1f}"
        assert f"| `{run['recipe']}` | {top1} | {top5} | {norm} |" in text
        assert f"{top1} % top-1, {top5} % top-5 (seed 0)" in all_recipes()[run["recipe"]].text
    top1 = {run["recipe"].removeprefix("cifar100-short-"): float(run["top1"]) for run in runs}
    ripple = top1["ripple-tiny"]
    told = flowing("docs/cifar100.md")
    assert f"Ripple is {ripple - top1['deit-la-tiny']:.1f} points above DeiT-LA" in told
    assert f"and {ripple - top1['deit-tiny']:.1f} above DeiT" in told
    assert f"worth {ripple - top1['ripple-tiny-fixed']:.1f} points against" in told
    assert f"DeiT-LA is {top1['deit-tiny'] - top1['deit-la-tiny']:.1f} points behind" in told
    assert top1["ripple-tiny4"] > top1["deit-la-tiny"]
    kinds = "", "-fixed", "-logarithmic", "-truncated", "-softmax", "-r2", "-r8"
    theirs = {x: paper.ACCURACY[f"cifar100-ripple-tiny{x}"][0] for x in kinds}
    assert f"against fixed ones ({theirs[''] - theirs['-fixed']:.1f} there)" in told
    leads = {
        "DeiT-LA": (theirs[""] - paper.ACCURACY["cifar100-deit-la-tiny"][0], top1["deit-la-tiny"]),
        "DeiT": (theirs[""] - paper.ACCURACY["cifar100-deit-tiny"][0], top1["deit-tiny"]),
        "fixed ones": (theirs[""] - theirs["-fixed"], top1["ripple-tiny-fixed"]),
    }
    for other, (lead, ours) in leads.items():
        assert re.search(rf"\| \w.* {lead:.1f} .*above {other} \| {ripple - ours:.1f}\b", text)
    lost = ripple - top1["ripple-tiny-logarithmic"], theirs[""] - theirs["-logarithmic"]
    assert "cost {:.1f} ({:.1f} there)".format(*lost) in told
    near = ripple - top1["ripple-tiny-truncated"], theirs[""] - theirs["-truncated"]
    assert "beyond R_max costs {:.2f} ({:.2f} there)".format(*near) in told
    smooth = ripple - top1["ripple-tiny-softmax"], theirs[""] - theirs["-softmax"]
    said = "in place of broken sticks costs {:.1f} ({:.1f} there), less than seeds differ"
    assert said.format(*smooth) in told
    seeds = [x for x in read_results("cifar100-seeds-nvidia-h200.csv") if "ripple" in x["recipe"]]
    assert smooth[0] < max(abs(ripple - float(row["top1"])) for row in seeds)
    small = ripple - top1["ripple-tiny-r2"], theirs[""] - theirs["-r2"]
    assert "R_max 2 instead of 4 costs {:.1f} ({:.1f} there)".format(*small) in told
    large = top1["ripple-tiny-r8"] - ripple, theirs[""] - theirs["-r8"]
    assert "and 8 gains {:.1f} (it costs {:.1f} there)".format(*large) in told
    assert large[0] < max(abs(ripple - float(row["top1"])) for row in seeds)
    layers = {}
    for row in read_results("strength-cifar100-short-ripple-tiny.csv"):
        values = float(row["strength"]), float(row["share_below_half"])
        layers.setdefault(row["layer"], []).append(values)
    means = [[statistics.mean(x) for x in zip(*heads, strict=True)] for heads in layers.values()]
    columns = zip(*means, strict=True)
    strong, weak = ([f"{100 * x:.0f}" for x in sorted(column)] for column in columns)
    assert f"It leaves {strong[0]} to {strong[-1]} % of the attention" in told
    assert f"less than half of it for {weak[0]} to {weak[-1]} % of the tokens" in told


def test_results_of_four_layers_are_those_of_their_files():
    text, told = (ROOT / "docs/cifar100.md").read_text(), flowing("docs/cifar100.md")
    short = {row["recipe"]: row for row in read_results("cifar100-short-nvidia-h200.csv")}
    deit, deit_long, ripple_long = read_results("cifar100-4-layers-nvidia-h200.csv")
    for row, epochs in ((deit, "60"), (deit_long, "300"), (ripple_long, "300")):
        assert row["epochs"] == epochs
        assert ("model.depth: None → 4" in row["changes"]) == row["recipe"].endswith("deit-tiny")
    assert "optimizer.decay_feature_maps: True → False" in ripple_long["changes"]
    linear, ripple = (short[f"cifar100-short-{name}-tiny4"] for name in ("deit-la", "ripple"))
    theirs = [
        rounded(paper.TOP1_OF_TABLE_8[f"cifar100-{name}-tiny4"]) for name in ("deit-la", "ripple")
    ]
    tops = [rounded(row["top1"]) for row in (linear, deit, deit_long, ripple, ripple_long)]
    assert f"| DeiT-LA, four layers | {tops[0]} | – | {theirs[0]} |" in text
    assert f"| DeiT, four layers | {tops[1]} | {tops[2]} | – |" in text
    assert f"| ripple, four layers | {tops[3]} | {tops[4]} | {theirs[1]} |" in text
    assert f"| ripple of four layers {theirs[1]} % | {tops[4]} after 300 |" in text
    assert f"Of four layers it reaches {tops[4]} %, the paper's {theirs[1]}." in told
    leads = [
        float(r["top1"]) - float(d["top1"]) for r, d in ((ripple, deit), (ripple_long, deit_long))
    ]
    assert (
        "is {:.1f} points at the end of 60 epochs and {:.1f} at the end of 300".format(*leads)
        in told
    )
    assert "it is {:.1f} after 60 epochs and {:.1f} after 300".format(*leads) in told
    folder = "cifar100-4-layers-nvidia-h200"
    pairs = [
        ("cifar100-short-nvidia-h200/ripple4.csv", f"{folder}/deit4-60.csv"),
        (f"{folder}/ripple4-300.csv", f"{folder}/deit4-300.csv"),
    ]
    losses = [[losses_by_epoch(name) for name in names] for names in pairs]
    behind = [{epoch: d[epoch] - loss for epoch, loss in r.items()} for r, d in losses]
    ends = [abs(x[max(x)]) for x in behind]
    assert "last five epochs, differ by {:.3f} and {:.3f};".format(*ends) in told
    assert f"ripple's is lower by up to {max(behind[1].values()):.3f}." in told
    curves = [top1_by_epoch(name) for name in pairs[1]]
    lead = {epoch: curves[0][epoch] - top1 for epoch, top1 in curves[1].items()}
    low, high = min(lead, key=lead.get), max((x for x in lead if x <= 100), key=lead.get)
    dip = min((x for x in lead if x > 110), key=lead.get)
    some = "{:.1f} points at epoch 10, {:.1f} at {}, {:.1f} at {}, {:.1f} at {}, and"
    some = some.format(lead[10], lead[low], low, lead[high], high, lead[dip], dip)
    late = [x for epoch, x in lead.items() if epoch >= 180]
    assert some.replace("-", "−") in told
    assert f"between {min(late):.1f} and {max(late):.1f} from epoch 180 on." in told
    assert float(ripple_long["gradient_norm_max"]) < 3.9 and "Gradients stay below 3.9" in told
    embedded, _ = read_weights(EMBEDDED)
    sizes = [float(x.float().std()) for name, x in embedded.items() if name.endswith(".w1")]
    assert f"deviations of {min(sizes):.2f} to {max(sizes):.2f} by layer" in told
    strength = "strength-cifar100-4-layers-ripple4-300.csv"
    dead = [100 * float(row["dead_features_of_all_heads"]) for row in read_results(strength)]
    assert f"{min(dead):.0f} to {max(dead):.0f} % of a layer's features are dead" in told
    within = [100 * float(row["dead_features"]) for row in read_results(strength)]
    assert f"and {statistics.mean(within):.1f} % within a head in the mean" in told
    minutes = [float(row["minutes_of_last_session"]) for row in (deit_long, ripple_long)]
    assert "300 epochs took {:.0f} and {:.0f} minutes with four layers".format(*minutes) in told
    fit = {
        (x["model"], x["split"]): float(x["top1"])
        for x in read_results("fit-cifar100-4-layers.csv")
    }
    right = f"names {fit['ripple', 'train']:.1f} % rightly and DeiT {fit['DeiT', 'train']:.1f} ("
    assert right in told and "also does better on training images" in told
    readme = flowing("README.md")
    assert f"{tops[4]} % top-1 after 300 epochs (the paper: {theirs[1]})" in readme
    assert f"(ripple_lab/weights/cifar100.md): {tops[4]} % top-1; the paper: {theirs[1]})" in readme
    said = f"{tops[4]} % top-1, {rounded(ripple_long['top5'])} % top-5 (seed 0)"
    assert said in all_recipes()["cifar100-ripple-tiny4"].text


def test_results_of_twelve_layers_in_300_epochs_are_those_of_their_files():
    text, told = (ROOT / "docs/cifar100.md").read_text(), flowing("docs/cifar100.md")
    deit, _ = read_results("cifar100-300-epochs-nvidia-h200.csv")
    assert (deit["recipe"], deit["epochs"]) == ("cifar100-deit-tiny", "300")
    assert not re.search("optimizer|model|augmentation|mixing", deit["changes"])
    short = {row["recipe"]: row for row in read_results("cifar100-short-nvidia-h200.csv")}
    sixty = {x: rounded(short[f"cifar100-short-{x}-tiny"]["top1"]) for x in ("deit", "ripple")}
    theirs = {x: paper.ACCURACY[f"cifar100-{x}-tiny"][0] for x in sixty}
    printed = {name: rounded(top1) for name, top1 in theirs.items()}
    ours = rounded(deit["top1"])
    assert f"| DeiT, twelve layers | {sixty['deit']} | {ours} | {printed['deit']} |" in text
    assert f"| DeiT {printed['deit']} % | {ours} after 300 | *300 epochs* |" in text
    ahead = float(deit["top1"]) - theirs["deit"]
    assert f"it reaches {ours} %, {ahead:.1f} points more than the paper's." in told
    assert f"and {ahead:.1f} points further at the end" in told
    assert f"| 300 epochs, twelve layers | {ahead:.1f} points above it |" in text
    base = Decimal(short["cifar100-short-deit-tiny"]["top1"])
    curves = [top1_by_epoch(f"cifar100-300-epochs-nvidia-h200/{x}.csv") for x in sixty]
    late = rounded(curves[1][300] - curves[0][300], "0.01")
    for system, name in (("DeiT-LA", "deit-la"), ("ConViT", "convit"), ("ripple", "ripple")):
        other = Decimal(str(paper.ACCURACY[f"cifar100-{name}-tiny"][0]))
        after_60 = Decimal(short[f"cifar100-short-{name}-tiny"]["top1"]) - base
        leads = other - Decimal(str(theirs["deit"])), other - Decimal(deit["top1"]), after_60
        shown = " | ".join(f"{rounded(x, '0.01')}".replace("-", "−") for x in leads)
        assert f"| {system} | {shown} | {late if name == 'ripple' else '–'} |" in text
        off = [abs(after_60 - x) for x in leads[:2]]
        assert leads[1] < after_60 < leads[0] if name == "ripple" else off[1] < off[0] / 2
    level = min(epoch for epoch, top1 in curves[0].items() if top1 >= theirs["deit"])
    assert f"where the paper's ends, {printed['deit']} %, at epoch {level} of 300" in told
    assert f"and DeiT of twelve {float(deit['minutes_of_last_session']):.0f}." in told
    said = f"{ours} % top-1, {rounded(deit['top5'])} % top-5 (seed 0)"
    assert said in all_recipes()["cifar100-deit-tiny"].text
    assert f"DeiT of twelve, {ours} (the paper: {printed['deit']})" in flowing("README.md")


def test_ripple_of_twelve_layers_in_300_epochs_is_that_of_its_files():
    text, told = (ROOT / "docs/cifar100.md").read_text(), flowing("docs/cifar100.md")
    _, run = read_results("cifar100-300-epochs-nvidia-h200.csv")
    assert (run["recipe"], run["epochs"]) == ("cifar100-ripple-tiny", "300")
    changed = "optimizer.decay_feature_maps: True → False; ema_decay: 0.99996 → None;"
    assert run["changes"].startswith(changed)
    names = ("deit", "ripple", "ripple-cut-off")
    files = [f"cifar100-300-epochs-nvidia-h200/{x}.csv" for x in names]
    deit, ripple, earlier = (top1_by_epoch(name) for name in files)
    ours, theirs = float(run["top1"]), paper.ACCURACY["cifar100-ripple-tiny"]
    assert abs(ripple[300] - ours) < 0.01
    top1, top5, printed = rounded(run["top1"]), rounded(run["top5"]), rounded(theirs[0])
    assert f"| ripple {printed} % | {top1} after 300 | *300 epochs* |" in text
    assert re.search(rf"\| ripple, twelve layers \| \S+ \| {top1} \| {printed} \|", text)
    assert f"at full length, it reaches {top1} %, the paper's {printed}. Of four" in told
    minutes = float(run["minutes_of_last_session"])
    assert f"its last session took {minutes:.0f} minutes" in told
    last = max(float(row["epoch"]) for row in read_results(files[2]))
    assert int(last) == 274 and "in epoch 274" in told
    both = f"{earlier[270]:.1f} % at epoch 270, where this one has {ripple[270]:.1f}."
    apart = max(abs(top1 - ripple[epoch]) for epoch, top1 in earlier.items() if epoch >= 50)
    assert f"{both} From epoch 50 on the two differ by up to {apart:.1f} points." in told
    above = min(e for e in ripple if all(ripple[x] > theirs[0] for x in ripple if x >= e))
    assert f"above the paper's {printed} % from epoch {above} on: {top1} % top-1" in told
    assert f"and {top5} top-5 at the end (the paper: {rounded(theirs[1])} top-5)" in told
    leads = {epoch: top1 - deit[epoch] for epoch, top1 in ripple.items()}
    said = "is {:.1f} points at epoch 30, {:.1f} at 100, {:.1f} at 200 and {:.1f} at 300,"
    assert said.format(*(leads[x] for x in (30, 100, 200, 300))) in told
    between = [lead for epoch, lead in leads.items() if epoch >= 30]
    assert min(between) > 2.1 and max(between) < 3.5 and "below 2.1 or above 3.5 between" in told
    losses = [losses_by_epoch(name) for name in files[:2]]
    lower = {epoch: losses[0][epoch] - loss for epoch, loss in losses[1].items()}
    assert all(x > 0 for epoch, x in lower.items() if epoch <= 160)
    assert all(x < 0 for epoch, x in lower.items() if epoch >= 190)
    assert f"until epoch 160, by up to {max(lower.values()):.3f}, and above it" in told
    assert f"from epoch 190 on, by {-lower[300]:.3f} at the end" in told
    deits = paper.ACCURACY["cifar100-deit-tiny"][0]
    lead = theirs[0] - deits, leads[300]
    assert "paper's lead of {:.1f} points into {:.1f} is DeiT".format(*lead) in told
    assert f" {lead[1]:.1f} after 300 | *60 epochs*, *Class tokens*" in text
    parts = ours - theirs[0], deit[300] - deits
    assert "ends {:.1f} points above the paper's, and DeiT {:.1f}".format(*parts) in told
    said = f"{top1} % top-1, {top5} % top-5 (seed 0)"
    assert said in all_recipes()["cifar100-ripple-tiny"].text
    assert f"ripple of twelve, {top1} (the paper: {printed})" in flowing("README.md")


def test_plain_sticks_are_those_of_their_file():
    told = flowing("docs/cifar100.md")
    names = [f"cifar100-{x}-nvidia-h200/ripple.csv" for x in ("plain-sticks", "short")]
    (plain, balanced), (loss, other) = (
        [read(name) for name in names] for read in (top1_by_epoch, losses_by_epoch)
    )
    assert max(plain) == 35
    assert max(abs(loss[x] - other[x]) for x in plain) < 0.005
    assert max(abs(plain[x] - balanced[x]) for x in plain) < 0.8
    assert "by more than 0.005 from" in told and "by more than 0.8 points" in told
    assert f"at epoch 35 plain sticks are {plain[35] - balanced[35]:.1f} points ahead" in told
    rows = [row for row in read_results(names[0]) if row["jsd"]]
    jsd = {round(float(row["epoch"])): float(row["jsd"]) for row in rows}
    assert max(jsd) == 35 and jsd[0] < 1e-3 and jsd[10] > uniform_divergence(5)
    top = max(jsd, key=jsd.get)
    assert f"at epoch {top} ({jsd[top]:.2f}), and is {jsd[35]:.2f} at epoch 35" in told


def test_results_of_100_epochs_are_those_of_their_files():
    told = flowing("docs/cifar100.md")
    runs = {
        run["recipe"]: run["top1"] for run in read_results("cifar100-100-epochs-nvidia-h200.csv")
    }
    deit, ripple = (Decimal(runs[f"cifar100-short-{name}-tiny"]) for name in ("deit", "ripple"))
    gap = f"reaches {deit:.1f} % top-1 and ripple {ripple:.1f}, {ripple - deit:.1f} points above"
    assert gap in told
    folder = "cifar100-100-epochs-nvidia-h200"
    curves = [top1_by_epoch(f"{folder}/{name}.csv") for name in ("deit", "ripple")]
    leads = {epoch: curves[1][epoch] - curves[0][epoch] for epoch in curves[0]}
    assert f"leads by {leads[25]:.1f} points at epoch 25" in told and "by 2 to 4 from" in told
    assert all(2 <= lead <= 4 for epoch, lead in leads.items() if epoch >= 35)
    layers = {}
    for row in read_results("strength-cifar100-100-epochs-ripple-tiny.csv"):
        shares = [float(row[f"active_features_of_{x}"]) for x in ("queries", "keys")]
        layers.setdefault(row["layer"], []).append(shares)
    means = [[100 * statistics.mean(x) for x in zip(*it, strict=True)] for it in layers.values()]
    of_query, of_key = (f"{min(x):.0f} to {max(x):.0f} %" for x in zip(*means, strict=True))
    assert f"{of_query} of a query's and {of_key} of a key's" in told


def test_dead_features_are_those_of_their_files():
    told = flowing("docs/cifar100.md")
    of_layers, of_heads = [], []
    for name in ("short", "100-epochs"):
        rows = read_results(f"strength-cifar100-{name}-ripple-tiny.csv")
        layers = {row["layer"]: 100 * float(row["dead_features_of_all_heads"]) for row in rows}
        of_layers.append(list(layers.values()))
        of_heads.append(statistics.mean(100 * float(row["dead_features"]) for row in rows))
    first, last = (f"{statistics.mean(x):.0f} %" for x in of_layers)
    bounds = f"{min(of_layers[1]):.0f} to {max(of_layers[1]):.0f} % by layer"
    assert f"{first} are so in the mean after 60 epochs" in told
    assert f"and {last} after 100, {bounds}" in told
    assert f"within a head, {of_heads[0]:.0f} and {of_heads[1]:.0f} % are zero" in told


def test_shrunk_maps_are_those_of_their_file():
    told = flowing("docs/cifar100.md")
    rows = read_results("shrunk-feature-maps.csv")
    found = {(r["epochs"], r["factor_on_w1"], r["factor_on_w2"]): r for r in rows}
    trained = [found[x, "1", "1"] for x in ("60", "100")]
    sizes = [float(x["standard_deviation_of_w1"]) for x in trained]
    assert f"it is at {sizes[0]:.2f} and {sizes[1]:.2f}" in told
    spec = all_recipes()["cifar100-short-ripple-tiny"].recipe.optimizer
    kept = {}
    for epochs in (60, 100):
        rates = (learning_rate(step, 97, epochs, spec) for step in range(97 * epochs))
        kept[epochs] = math.prod(1 - rate * spec.weight_decay for rate in rates)
    words = f"take it to {kept[60]:.2f} of its start in 60 epochs and to {kept[100]:.2f} in 100"
    assert words in told and f"times {kept[100] / kept[60]:.3f}, which is" in told
    dead = "dead_features_of_all_heads_percent"
    of_w1, of_w2 = found["60", "0.907", "1"][dead], found["60", "1", "0.907"][dead]
    now, later = (x[dead] for x in trained)
    assert f"{of_w1} % of a layer's features are dead in all heads instead of {now}" in told
    assert f"has ({later}); the same factor on W₂ gives {of_w2}" in told
    taken_back = [row for row in rows if float(row["factor_on_w1"]) > 1]
    assert len(taken_back) == 2 and all(float(row[dead]) == 0 for row in taken_back)


def test_trials_are_those_of_their_file():
    text = (ROOT / "docs/cifar100.md").read_text()
    rows = read_results("trials-cifar100-short-nvidia-h200.csv")
    lasts = {(row["recipe"], row["options"]): row for row in rows}
    trials = [key for key in lasts if key[1]]
    assert len(trials) == 6
    for recipe, options in trials:
        last, plain = lasts[recipe, options], lasts[recipe, ""]
        assert last["epoch"] == plain["epoch"]
        words = " ".join(f"--{x.replace(':', '')}" for x in options.split("; "))
        pairs = [
            ", ".join(str(rounded(row[name], unit)) for row in (plain, last))
            for name, unit in (("mean_loss_of_5_epochs", "0.001"), ("top1", "0.1"))
        ]
        cells = [f"`{recipe}`", f"`{words}`", last["epoch"], *pairs]
        assert f"| {' | '.join(cells)} |" in text


def test_the_trial_of_embeddings_is_that_of_its_file():
    told = flowing("docs/cifar100.md")
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
    assert f"cut off at epoch 45, {ahead:.1f} points ahead with the same loss" in told
    losses = (float(row["mean_loss_of_5_epochs"]) for row in cut.values())
    assert abs(next(losses) - next(losses)) < 0.001
    early, later = (f"{float(found['1', epoch]['jsd']):.2f}" for epoch in (5, 20))
    assert f"the divergence is {early} after five epochs and {later} after 20" in told
    lead = [
        float(found["0.02", epoch]["mean_loss_of_5_epochs"])
        - float(found["1", epoch]["mean_loss_of_5_epochs"])
        for epoch in (20, 40)
    ]
    assert f"the training loss is {lead[0]:.2f} lower there" in told and abs(lead[1]) < 0.005
    shown = (rounded(found[x, 60]["top1"]) for x in ("1", "0.02"))
    assert "60 epochs give {} % instead of {}".format(*shown) in told


def test_the_trial_without_decay_is_that_of_its_file():
    told = flowing("docs/cifar100.md")
    rows = read_results("trial-no-decay-nvidia-h200.csv")
    found = {
        (row["recipe"], row["epochs"], int(row["epoch"]), row["decay_of_feature_maps"]): row["top1"]
        for row in rows
    }
    for row in read_results("cifar100-short-nvidia-h200.csv"):
        assert found.get((row["recipe"], "60", 60, "yes"), row["top1"]) == row["top1"]

    def shown(model):
        key = f"cifar100-short-{model}", "60", 60
        return tuple(rounded(found[*key, decay]) for decay in ("no", "yes"))

    assert (
        "60 epochs give {} % top-1 for ripple instead of {}".format(*shown("ripple-tiny")) in told
    )
    assert "and {} for DeiT-LA instead of {}".format(*shown("deit-la-tiny")) in told
    key = "cifar100-short-ripple-tiny", "100"
    epochs = sorted({int(row["epoch"]) for row in rows if row["epochs"] == "100"})
    ahead = [Decimal(found[*key, e, "no"]) - Decimal(found[*key, e, "yes"]) for e in epochs]
    least, most = rounded(min(ahead)), rounded(max(ahead))
    words = (
        f"{least} to {most} points ahead of that with decay at epochs {epochs[0]} to {epochs[-1]}"
    )
    assert words in told


def test_the_trial_of_the_papers_rate_is_that_of_its_file():
    told = flowing("docs/cifar100.md")
    rows = {
        (row["recipe"].removeprefix("cifar100-short-"), row["learning_rate"], row["epoch"]): row
        for row in read_results("trial-lr-5e-4-nvidia-h200.csv")
    }
    losses, tops = {}, {}
    for name in ("deit-tiny", "ripple-tiny"):
        both = [rows[name, rate, "30"] for rate in ("0.0005", "0.001")]
        losses[name] = tuple(f"{float(row['mean_loss_of_5_epochs']):.3f}" for row in both)
        tops[name] = [Decimal(row["top1"]) for row in both]
    assert "that of 1e-3, {} and {} over".format(*losses["deit-tiny"]) in told
    assert "is higher, {} and {}:".format(*losses["ripple-tiny"]) in told
    leads = [f"{r - d:.1f}" for r, d in zip(tops["ripple-tiny"], tops["deit-tiny"], strict=True)]
    assert "leads by {} points at epoch 30 instead of {}".format(*leads) in told


def test_leads_over_deit_are_those_of_their_files():
    text = (ROOT / "docs/cifar100.md").read_text()
    told = flowing("docs/cifar100.md")
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
    assert f"Ripple is {above:.1f} points above DeiT-LA there" in told
    short, before = leads("cifar100-short-nvidia-h200.csv", "cifar100-short-")
    gains = [round(means[name] - before[name]) for name in means]
    assert f"reach {min(gains)} to {max(gains)} points more than above" in told
    convit = before["convit-tiny"]
    assert f"leads DeiT by {convit - before['deit-tiny']:.1f} points in 60 epochs" in told
    assert f"ripple is {before['ripple-tiny'] - convit:.1f} points above ConViT" in told
    stable, _ = leads("stability-nvidia-h200.csv", "cifar100-20-")
    longer, _ = leads("cifar100-100-epochs-nvidia-h200.csv", "cifar100-short-")
    assert f"light augmentation, 20 epochs, three seeds {stable}" in told
    assert f"the paper's, 60 epochs {short}" in told
    assert f"the paper's, 100 epochs {longer}" in told
    assert f"light augmentation, 60 epochs {light}" in told
    theirs = {
        name: Decimal(str(paper.ACCURACY[f"cifar100-{name}-tiny"][0]))
        for name in ("deit", "deit-la", "convit", "ripple")
    }
    deit = theirs["deit"]
    of_la = f"{theirs['deit-la'] - deit:.1f}".replace("-", "−")
    row = f"the paper, 300 epochs | {deit:.1f} | {theirs['ripple'] - deit:.1f} | {of_la} |"
    assert row in told
    assert f"({theirs['convit'] - deit:.1f} in the paper)" in told
    assert f"({theirs['convit'] - theirs['ripple']:.1f} below it in the paper)" in told
    of_deit, of_la, of_ripple = (
        losses_by_epoch(f"cifar100-light-nvidia-h200/{name}.csv")
        for name in ("deit", "la", "ripple")
    )
    behind = {epoch: of_la[epoch] - loss for epoch, loss in of_deit.items()}
    ahead = {epoch: loss - of_ripple[epoch] for epoch, loss in of_deit.items()}
    assert [epoch for epoch in behind if behind[epoch] < 0] == [5, 10, 15]
    assert f"{behind[60]:.2f} above it at the end" in told and min(ahead.values()) > 0
    assert f"by {max(ahead.values()):.2f} at most and by {ahead[60]:.2f} at the end" in told


def test_class_tokens_and_missing_positions_are_those_of_their_files():
    text = (ROOT / "docs/cifar100.md").read_text()
    told = flowing("docs/cifar100.md")

    def tops(file):
        names = re.compile(r"cifar100-(?:short-)?(.*?)(?:-no-ape)?$")
        rows = read_results(f"cifar100-{file}-nvidia-h200.csv")
        return {names.match(row["recipe"])[1]: Decimal(row["top1"]) for row in rows}

    mean, token, blind = tops("short"), tops("class-token"), tops("no-ape")
    ripple = mean["ripple-tiny"]
    for system, name in (("DeiT", "deit-tiny"), ("DeiT-LA", "deit-la-tiny")):
        shown = [mean[name], token[name], ripple - mean[name], ripple - token[name]]
        shown = map(rounded, shown)
        assert "| {} | {} | {} | {}, {} |".format(system, *shown) in text
    folders = "short", "class-token"
    curves = [top1_by_epoch(f"cifar100-{folder}-nvidia-h200/deit.csv") for folder in folders]
    behind = {epoch: x - curves[1][epoch] for epoch, x in curves[0].items()}
    assert max(behind, key=behind.get) == 25
    assert f"it is {behind[25]:.1f} points behind at epoch 25, and {behind[60]:.1f} at" in told
    systems = {"DeiT-LA": "deit-la", "DeiT": "deit", "ConViT": "convit", "ripple": "ripple"}
    for system, name in systems.items():
        ours = mean[f"{name}-tiny"], blind[f"{name}-tiny"]
        theirs = [paper.ACCURACY[f"cifar100-{name}-tiny{x}"][0] for x in ("", "-no-ape")]
        shown = map(rounded, (*ours, ours[0] - ours[1]))
        row = "| {} | {} | {} | {} | {:.1f} |".format(system, *shown, theirs[0] - theirs[1])
        assert row in text
    lead = blind["ripple-tiny"] - blind["deit-tiny"]
    of_paper = [paper.ACCURACY[f"cifar100-{x}-tiny-no-ape"][0] for x in ("ripple", "deit")]
    blind_lead = of_paper[0] - of_paper[1]
    row = f"| ripple {blind_lead:.1f} above DeiT without position embeddings | {lead:.1f} |"
    assert row in text
    words = f"leads by {lead:.1f} points there ({blind_lead:.1f} in the paper)"
    of_la = blind["ripple-tiny"] - blind["deit-la-tiny"], ripple - mean["deit-la-tiny"]
    said = "add {} points to the linear attention of DeiT-LA there, and {} where positions"
    assert said.format(*map(rounded, of_la)) in told
    theirs = [paper.ACCURACY[f"cifar100-{x}-tiny-no-ape"][0] for x in ("convit", "ripple")]
    above = rounded(blind["convit-tiny"] - blind["ripple-tiny"]), theirs[0] - theirs[1]
    assert "{} points above it ({:.1f} in the paper)".format(*above) in told
    short = ripple - mean["deit-tiny"], ripple - token["deit-tiny"]
    longer = {x["recipe"]: x["top1"] for x in read_results("cifar100-100-epochs-nvidia-h200.csv")}
    names = "cifar100-short-ripple-tiny", "cifar100-short-deit-tiny"
    numbers = *short, Decimal(longer[names[0]]) - Decimal(longer[names[1]])
    shown = "{:.1f}, or {:.1f} if DeiT classifies a class token; {:.1f} in 100 epochs"
    assert f"| {shown.format(*numbers)}; " in text
    assert f"where ripple is {short[1]:.1f} points above it" in told
    assert words in told and abs(blind["ripple-tiny"] - mean["deit-tiny"]) < Decimal("0.1")


def test_seeds_and_more_features_are_those_of_their_files():
    text = (ROOT / "docs/cifar100.md").read_text()
    told = flowing("docs/cifar100.md")
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
    assert f"leads by {lead:.1f} points in the mean, and" in told
    assert f"; {lead:.1f} in the mean of seeds; " in text
    assert f"best of DeiT's by {min(tops['ripple']) - max(tops['deit']):.1f}." in told
    assert max(max(x) - min(x) for x in tops.values()) < 0.5
    assert "which differ by less than half a point" in told
    token = read_results("cifar100-class-token-nvidia-h200.csv")[0]
    assert token["recipe"] == "cifar100-short-deit-tiny"
    assert f"the mean leads by {means['ripple'] - float(token['top1']):.1f}." in told
    (wide,) = read_results("cifar100-64-features-nvidia-h200.csv")
    assert wide["changes"] == "model.num_features: None → 64"
    both = f"{float(wide['top1']):.1f} % instead of {tops['deit-la'][0]:.1f}"
    assert f"DeiT-LA reaches {both}" in told
    folders = "cifar100-64-features-nvidia-h200", "cifar100-short-nvidia-h200"
    losses = [losses_by_epoch(f"{folder}/ripple.csv") for folder in folders]
    assert max(losses[0]) == 45
    last = read_results(f"{folders[0]}/ripple.csv")[-1]
    assert f"stopped in epoch {math.ceil(float(last['epoch']))}:" in told
    of_maps = []  # numbers a layer, at least and at most, by the counts of table 8
    for name, counts in paper.PARAMETERS.items():
        if "table 8" in counts:
            model = timm.create_model(name, num_classes=100)
            maps = [x for x in model.modules() if isinstance(x, Learned)]
            own = sum(x.numel() for feature_map in maps for x in feature_map.parameters())
            rest = sum(x.numel() for x in model.parameters()) - own
            bounds = (1e6 * (counts["table 8"] + x) - rest for x in (-0.005, 0.005))
            of_maps.append([x / len(maps) / 1e3 for x in bounds])
            assert f"{counts['table 8']:.2f}" in told
    least, most = max(x[0] for x in of_maps), min(x[1] for x in of_maps)
    assert f"maps of {least:.1f} to {most:.1f} thousand numbers a layer" in told
    assert f"where 32 features make {own / len(maps) / 1e3:.1f} " in told
    shown = (f"{x[45]:.3f}" for x in losses)
    assert "before epoch 45 is {}, that of 32 features {}".format(*shown) in told
    many, few = (top1_by_epoch(f"{folder}/ripple.csv")[45] for folder in folders)
    assert f"it is {few - many:.1f} points behind there" in told
