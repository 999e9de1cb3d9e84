"""The commands, as a person would type them."""

import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from processes import ripple
from ripple_attention import chebyshev
from ripple_lab import commands as cli
from ripple_lab.bench.model import SYSTEMS
from ripple_lab.commands import train as commands
from ripple_lab.commands.bench import systems_named
from ripple_lab.data.batch_augment import normalize
from ripple_lab.data.cifar100 import load_cifar100
from ripple_lab.data.digits import load_digits_images
from ripple_lab.inspection.viewer import EXAMPLES
from ripple_lab.plots import weight_map
from ripple_lab.recipes import find_recipe
from ripple_lab.reproduce.queries import own_result
from ripple_lab.train.checkpoint import (
    EMBEDDED,
    CheckpointError,
    describe,
    read_description,
    read_weights,
    write_weights,
)
from ripple_lab.train.evaluate import Predictor, evaluate
from ripple_lab.train.network import preprocessing
from ripple_lab.train.recipe import differences

PNG = b"\x89PNG"


def test_picture_is_written(tmp_path):
    path = tmp_path / "new folder" / "ripples.png"
    assert ripple("picture", path).exit_code == 0
    assert path.read_bytes()[:4] == PNG
    assert ripple("picture", tmp_path / "ripples.svg").exit_code == 0
    assert "<svg" in (tmp_path / "ripples.svg").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new folder", "ripples.svg"]


def test_systems_of_a_benchmark_are_found_in_any_case():
    assert systems_named("deit-la OF", SYSTEMS) == ("DeiT-LA of 4 layers",)


def test_models_are_listed_beside_the_papers_counts():
    done = ripple("models", "--only", "tiny4", "--throughput", 1)
    assert done.exit_code == 0, done.output
    assert "ripple_tiny4_patch2_32" in done.output
    assert "1.89 (table 8)" in done.output
    assert "images/s" in done.output
    done = ripple("models", "--only", "smca_la_resnet50")
    assert done.exit_code == 0, done.output
    assert "41.7 (table 3)" in done.output
    assert "79 (table 3)" in done.output
    done = ripple("models", "--only", "vgg")
    assert done.exit_code == 2
    assert "smca_ripple_resnet18" in done.output


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What `ripple demo` leaves, after a shorter training."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return folder, ripple("demo", "--epochs", 2, "--output", folder)


def test_demo_trains_and_draws(demo):
    folder, done = demo
    assert done.exit_code == 0, done.output
    assert "Accuracy on 360 digits it has not seen" in done.output
    assert (folder / "ripples.png").read_bytes()[:4] == PNG


@pytest.mark.slow
def test_the_demo_reaches_97_percent(tmp_path):
    done = ripple("demo", "--output", tmp_path / "demo")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "demo/result.json").read_text())["top1"] >= 97


def test_evaluate_gives_the_accuracy_that_training_ended_with(demo):
    folder, _ = demo
    result = json.loads((folder / "result.json").read_text())
    for path in (folder, folder / "model.safetensors", folder / "checkpoints/step-00000118"):
        done = ripple("evaluate", path)
        assert done.exit_code == 0, done.output
        words = done.output.split()
        assert words[words.index("360") :][:5:2] == [
            "360",
            f"{result['top1']:.2f}",
            f"{result['top5']:.2f}",
        ]


def test_evaluate_shows_progress_on_a_screen_alone(demo):
    path = demo[0] / "model.safetensors"
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        evaluate(path, read_description(path)[0], console)
        assert ("batches" in console.file.getvalue()) == terminal
        assert terminal or console.file.getvalue() == ""


def test_evaluate_takes_fields_of_the_recipe(demo):
    done = ripple("evaluate", demo[0], "--data.name", "cifar100", "--data.root", "nowhere")
    assert "nowhere" in str(done.exception)


def test_predict_names_classes(demo, tmp_path):
    digits = load_digits_images(train=False)
    picture, broken = tmp_path / "digit.png", tmp_path / "broken.png"
    digits[0][0].convert("L").resize((50, 40)).save(picture)
    broken.write_bytes(picture.read_bytes()[:200])
    done = ripple("predict", demo[0], picture, "--top", 3)
    assert done.exit_code == 0, done.output
    assert done.output.count("%") == 3
    assert str(picture) in done.output.splitlines()  # however long it is
    done = ripple("predict", demo[0], broken, picture)
    assert done.output.count("%") == 5
    assert f"{broken} cannot be read as a picture" in str(done.exception)
    assert "save it anew" in str(done.exception)
    assert "is a folder: name" in str(ripple("predict", demo[0], tmp_path).exception)
    assert "does not exist" in str(ripple("predict", demo[0], "no.png").exception)


def test_predict_says_what_training_saw(demo):
    """The most likely class of `predict` is right as often as `evaluate` says."""
    folder, _ = demo
    predictor, digits = Predictor(folder / "model.safetensors"), load_digits_images(train=False)
    right = [predictor(digits[i][0])[0][0] == str(digits[i][1]) for i in range(len(digits))]
    result = json.loads((folder / "result.json").read_text())
    assert 100 * sum(right) / len(right) == pytest.approx(result["top1"])


def test_the_embedded_model_is_what_its_card_says(tmp_path):
    predictor, card = Predictor(EMBEDDED), EMBEDDED.with_suffix(".md").read_text()
    changed = differences(find_recipe("cifar100-ripple-tiny4"), predictor.recipe)
    assert f"| {'; '.join(changed)} |" in card and "optimizer.decay_feature_maps" in changed[0]
    assert "`ripple train cifar100-ripple-tiny4 --seed 0`" in card
    results = Path(__file__).parents[2] / "benchmarks/results/cifar100-4-layers-nvidia-h200.csv"
    (run,) = (
        row for row in csv.DictReader(results.open()) if row["recipe"] == predictor.recipe.name
    )
    assert f"top-1 % {float(run['top1']):.4g}, top-5 % {float(run['top5']):.4g} on" in card
    assert EMBEDDED.stat().st_size < 4 * 2**20
    assert {x.dtype for x in read_weights(EMBEDDED)[0].values()} == {torch.half}
    picture = tmp_path / "flower.png"
    EXAMPLES["flower"]().save(picture)
    alone, named = ripple("predict", picture), ripple("predict", "embedded", picture)
    assert alone.exit_code == 0 and alone.output == named.output
    assert "rose" in alone.output and "poppy" in alone.output
    done = ripple("predict", "embedded")
    assert done.exit_code == 2 and "a picture must follow" in done.output


@pytest.mark.slow
def test_the_embedded_model_is_as_good_as_its_card_says():
    """Needs CIFAR-100 in the folder that RIPPLE_CIFAR100 names; minutes on a CPU."""
    root = os.environ.get("RIPPLE_CIFAR100")
    if root is None:
        pytest.skip("needs CIFAR-100: set RIPPLE_CIFAR100 to the folder that holds it")
    images, predictor = load_cifar100(root, train=False), Predictor(EMBEDDED)
    config = preprocessing(predictor.model)
    right = 0
    for some, labels in zip(images.images.split(250), images.labels.split(250), strict=True):
        with torch.no_grad():
            logits = predictor.model(normalize(some, config["mean"], config["std"]))
        right += int((logits.argmax(1) == labels).sum())
    (said,) = re.findall(r"top-1 % ([\d.]+),", EMBEDDED.with_suffix(".md").read_text())
    assert 100 * right / len(images.labels) == pytest.approx(float(said), abs=0.3)


def test_results_are_gathered(demo, tmp_path):
    path = tmp_path / "new folder" / "results.csv"
    done = ripple("results", demo[0], "--output", path)
    assert done.exit_code == 0, done.output
    (row,) = csv.DictReader(path.open())
    assert row["recipe"] == "digits"
    assert row["changes"] == "optimizer.warmup_epochs: 3 → 1; epochs: 24 → 2"
    assert float(row["top1"]) == pytest.approx(
        json.loads((demo[0] / "result.json").read_text())["top1"], abs=1e-3
    )
    assert "it is no folder of a run" in str(
        ripple("results", tmp_path, "--output", path).exception
    )


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"{}", b"3", b"\xff\xfe"])
def test_a_damaged_result_is_named_with_its_remedy(damaged, demo, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(demo[0] / "recipe.json", run)
    (run / "result.json").write_bytes(damaged)
    error = ripple("results", run, "--output", tmp_path / "results.csv").exception
    assert isinstance(error, ValueError) and len(str(error).splitlines()) == 1
    assert f"names its recipe; {run / 'result.json'} is not (" in str(error)
    assert f"`ripple train {run}/recipe.json --output {run} --resume` makes it anew" in str(error)
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("damaged", ["", "[", "{}", '"digits"', "[1, 2]", "null"])
def test_damaged_names_of_classes_are_named_with_their_file(damaged, demo, tmp_path):
    weights, metadata = read_weights(demo[0] / "model.safetensors")
    path = tmp_path / "model.safetensors"
    write_weights(path, weights, metadata | {"classes": damaged})
    error = ripple("evaluate", path).exception
    assert isinstance(error, CheckpointError) and len(str(error).splitlines()) == 1
    assert f"a JSON list of names; that of {path} is not (" in str(error)
    assert "as `ripple train` or `ripple pack` wrote it" in str(error)


def test_weights_that_do_not_fit_are_counted_and_the_first_named(demo, tmp_path):
    weights, metadata = read_weights(demo[0] / "model.safetensors")
    names = list(Predictor(demo[0] / "model.safetensors").model.state_dict())
    gone = [name for name in names if name.startswith("blocks.")]
    others = {name: weights[name] for name in names if name not in gone}
    others |= {"strange": torch.zeros(1), "head.bias": torch.zeros(3)}
    path = tmp_path / "model.safetensors"
    write_weights(path, others, metadata)
    error = ripple("evaluate", path).exception
    assert isinstance(error, CheckpointError) and len(str(error).splitlines()) == 1
    assert str(error).startswith(f"{path} does not fit the model that its recipe names; weights: ")
    assert f"{len(gone)} missing ({', '.join(gone[:3])}, …), 1 unexpected (strange), " in str(error)
    assert "1 of another shape (head.bias). Take the file" in str(error)
    assert gone[3] not in str(error)


def test_a_packed_model_is_half_as_large_and_says_what_it_is(demo, tmp_path):
    folder, path = demo[0], tmp_path / "new" / "digits.safetensors"
    done = ripple("pack", folder, path)
    assert done.exit_code == 0, done.output
    whole, packed = folder / "model.safetensors", Predictor(path)
    assert path.stat().st_size < 0.6 * whole.stat().st_size
    assert path.stat().st_mode == path.with_suffix(".md").stat().st_mode  # as any file
    assert {x.dtype for x in read_weights(path)[0].values()} == {torch.half}
    digit = load_digits_images(train=False)[0][0]
    for (label, ours), (expected, theirs) in zip(
        packed(digit), Predictor(whole)(digit), strict=True
    ):
        assert label == expected and ours == pytest.approx(theirs, abs=2e-3)
    result = json.loads((folder / "result.json").read_text())
    card = path.with_suffix(".md").read_text()
    assert "`ripple train digits --seed 0`" in card and "epochs: 24 → 2" in card
    assert f"top-1 % {result['top1']:.4g}, top-5 % {result['top5']:.4g} on" in card
    assert sorted(x.name for x in path.parent.iterdir()) == ["digits.md", "digits.safetensors"]


def test_what_cannot_be_packed_is_refused_in_words(demo, tmp_path):
    assert "a .safetensors file; got" in str(ripple("pack", demo[0], tmp_path / "x.pt").exception)
    path = tmp_path / "x.safetensors"
    assert "it is no folder of a run" in str(ripple("pack", tmp_path, path).exception)
    run = shutil.copytree(demo[0], tmp_path / "run")
    weights, metadata = read_weights(run / "model.safetensors")
    recipe, classes = read_description(run / "model.safetensors")
    elsewhere = replace(recipe, data=replace(recipe.data, root="/home/somebody/data"))
    write_weights(run / "model.safetensors", weights, describe(elsewhere, classes))
    assert ripple("pack", run, path).exit_code == 0
    assert read_description(path)[0].data.root == "data"
    weights["head.bias"][0] = 1e5
    write_weights(run / "model.safetensors", weights, metadata)
    before = path.read_bytes()
    assert "head.bias has 100,000" in str(ripple("pack", run, path).exception)
    assert path.read_bytes() == before


def test_analyze_also_draws_the_divergence_in_training(demo, tmp_path):
    folder, _ = demo
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [row for row in metrics if row["kind"] == "ripples"]
    for name, path in (("run", folder), ("step", folder / "checkpoints/step-00000118")):
        done = ripple("analyze", path, "--count", 2, "--output", tmp_path / name)
        assert done.exit_code == 0, done.output
        curve = tmp_path / name / "divergence-in-training.csv"
        assert str(curve) in done.output.replace("\n", "")
        rows = list(csv.DictReader(curve.open()))
        assert [float(row["epoch"]) for row in rows] == [0, 1, 2]
        assert [float(row["jsd"]) for row in rows] == [row["jsd"] for row in expected]
        assert curve.with_suffix(".png").read_bytes()[:4] == PNG
        assert "<svg" in curve.with_suffix(".svg").read_text()


def test_recipes_are_listed():
    output = ripple("train", "--list").output
    names = ("cifar100-ripple-tiny", "imagenet-convit-tiny", "digits", "coco-smca-la-108")
    for name in (*names, "coco-mini-smca-ripple", "shapes-smca"):
        assert name in output
    ours = own_result("cifar100-ripple-tiny")
    assert re.search(rf"cifar100-ripple-tiny +300 +73\.9 +{re.escape(ours)} ", output)
    assert "AP 40.5" in output


def test_train_shows_every_field(capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.override(find_recipe("digits"), ["--help"], "ripple train digits")
    output = capsys.readouterr().out
    for field in ("--optimizer.lr", "--hardware.devices", "--model.max-distance", "--epochs"):
        assert field in output
    assert ripple("train").exit_code == 2
    assert ripple("train", "--help").exit_code == 0
    assert "comes before its fields" in ripple("train", "--epochs", 3).output


def test_weight_map_lays_weights_on_their_rings():
    weights = torch.tensor([1.0, 2.0, 3.0])
    expected = [[2.0, 2, 2, 3], [2, 1, 2, 3]]
    assert weight_map(weights, chebyshev(2), (1, 1), (2, 4)).tolist() == expected


def missing(module):
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.parametrize(
    ("command", "error", "shown"),
    [
        ("predict", missing("sklearn.datasets"), "needs sklearn.*pip install '.\\[demo]'"),
        ("app", missing("PIL"), "needs PIL.*pip install '.\\[app]'"),
        ("evaluate", missing("faster_coco_eval"), "pip install '.\\[detection]'"),
        (
            "train",
            RuntimeError(
                "Caught DataError in DataLoader worker process 0.\nOriginal Traceback …\n"
                "ripple_lab.data.images.DataError: 100 images could not be decoded\n"
            ),
            "^100 images could not be decoded$",
        ),
        (
            "results",
            FileNotFoundError(2, "No such file or directory", "a.csv"),
            "^a.csv cannot be read or written: No such file or directory$",
        ),
        ("pack", ValueError("one line " * 40 + "of a pipe"), "^(one line ){40}of a pipe$"),
    ],
)
def test_an_error_is_shown_without_a_traceback(command, error, shown, monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=error))
    monkeypatch.setattr("sys.argv", ["ripple", command])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert re.search(shown, capsys.readouterr().err.strip(), re.DOTALL)
