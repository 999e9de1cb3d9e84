"""Detectors in the engine that trains classifiers: recipes, resuming, evaluation, prediction."""

import csv
import json
import math
import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

pytest.importorskip("faster_coco_eval")

from test_train import stop_at

from processes import ripple, ripple_on_two_devices
from ripple_lab.data.images import DataError
from ripple_lab.detection import backbone, shapes
from ripple_lab.detection.evaluation import METRICS
from ripple_lab.detection.transforms import DetectionAugmentation
from ripple_lab.recipes import find_recipe
from ripple_lab.train.checkpoint import (
    find_weights,
    read_description,
    steps_kept,
)
from ripple_lab.train.detection import (
    DetectionDataSpec,
    DetectionOptimizerSpec,
    DetectionRecipe,
    DetectorSpec,
)
from ripple_lab.train.detector import DetectorTraining
from ripple_lab.train.evaluate import ObjectFinder, evaluate
from ripple_lab.train.recipe import Hardware, Recipe
from ripple_lab.train.recorder import DivergedError, read_metrics
from ripple_lab.train.run import train

SYSTEMS = ("smca", "smca_la", "smca_ripple")
TINY = DetectionRecipe(
    name="tiny",
    model=DetectorSpec(
        "smca_ripple_resnet18",
        pretrained_backbone=False,
        fixed_stages=1,
        stages=2,
        queries=20,
        encoder_layers=1,
        decoder_layers=2,
        width=32,
        heads=2,
        feedforward=32,
    ),
    data=DetectionDataSpec(
        "shapes", num_classes=3, evaluation_scale=48, count=9, evaluation_count=13
    ),
    augmentation=DetectionAugmentation(
        scales=(32, 48), max_size=64, crop_scales=(48,), crop_sizes=(32, 48)
    ),
    optimizer=DetectionOptimizerSpec(lr=1e-3, backbone_lr=1e-4, drops=(1,)),
    epochs=2,
    batch_size=2,
    ema_decay=0.9,
    log_every=2,
    hardware=Hardware("cpu", precision="32-true", workers=0),
)


def run(folder, recipe=TINY, resume=False):
    return train(recipe, folder, Console(file=StringIO()), resume)


def assert_same_weights(one, other):
    for name in ("model.safetensors", "ema.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), (name, key)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder)


def test_a_run_folder_holds_what_a_classifiers_does(whole):
    folder, result = whole
    assert Recipe.read(folder / "recipe.json") == TINY
    assert json.loads((folder / "result.json").read_text(), parse_constant=pytest.fail) == result
    assert result["steps"] == 8
    assert METRICS.keys() | {f"ema_{name}" for name in METRICS} <= result.keys()
    assert 0 < result["ap"] <= result["ap50"] <= 1  # not 0: others compare it
    assert result["ap_large"] is None  # the pictures have no room for one
    assert list((folder / "tensorboard").iterdir())
    assert list(steps_kept(folder / "checkpoints")) == [8]
    rows = read_metrics(folder / "metrics.jsonl")
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [4, 8]
    columns = list(csv.DictReader((folder / "metrics.csv").open()))
    assert {"loss", "focal", "l1", "giou", "ap", "ap_small"} <= columns[0].keys()
    recipe, classes = read_description(folder / "model.safetensors")
    assert recipe == TINY
    assert classes == shapes.CLASSES


def test_the_learning_rate_drops_and_the_backbone_has_its_own(whole):
    rows = [row for row in read_metrics(whole[0] / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
    state = torch.load(whole[0] / "checkpoints/step-00000008/trainer.pt", weights_only=True)
    groups = state["optimizer_states"][0]["param_groups"]
    assert {(g["initial_lr"], g["weight_decay"]) for g in groups} == {
        (1e-4, 1e-4),
        (1e-3, 1e-4),
    }
    module = DetectorTraining(TINY)
    trained = [p for p in module.model.parameters() if p.requires_grad]
    assert sum(len(group["params"]) for group in groups) == len(trained)


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_cut_run_goes_on_as_if_nothing_had_happened(step, whole, tmp_path):
    stop_at(tmp_path / "cut", TINY, step)
    assert list(steps_kept(tmp_path / "cut/checkpoints")) == [step]
    result = run(tmp_path / "cut", resume=True)
    assert result["steps"] == 8
    assert result["ap"] == whole[1]["ap"]
    assert_same_weights(tmp_path / "cut", whole[0])


def test_weights_that_are_no_numbers_stop_the_run_and_name_the_step(tmp_path, monkeypatch):
    original = DetectorTraining.training_step

    def training_step(self, batch, batch_idx):
        said = original(self, batch, batch_idx)
        return said | {"loss": said["loss"] * (math.nan if self.global_step == 4 else 1)}

    monkeypatch.setattr(DetectorTraining, "training_step", training_step)
    with pytest.raises(DivergedError, match="the loss of step 5 is nan"):
        run(tmp_path / "run", replace(TINY, log_every=4))  # found out after step 8
    assert not list(steps_kept(tmp_path / "run/checkpoints"))
    with pytest.raises(DivergedError, match="the loss of step 5 is nan"):
        run(tmp_path / "safe", replace(TINY, checkpoint_minutes=0.0))
    assert max(steps_kept(tmp_path / "safe/checkpoints")) == 4


def test_two_processes_do_what_one_does(tmp_path):
    # Without dropout, which differs from process to process.
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), epochs=1)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, drops=None))
    run(tmp_path / "one", recipe)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    words = "train", tmp_path / "recipe.json", "--output", tmp_path / "two"
    ripple_on_two_devices(tmp_path, *words, "--hardware.devices", "2")
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 5
    for row, other in zip(one, two, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"images_per_second", "kind"}:
            if row[name] is None:  # no object of that size
                assert other[name] is None, (name, row["step"])
            else:
                assert row[name] == pytest.approx(other[name], rel=1e-3), (name, row["step"])


@pytest.mark.parametrize("ema", [False, True])
def test_evaluation_finds_what_training_ended_with(whole, ema):
    folder, result = whole
    found = evaluate(find_weights(folder, ema), TINY)
    prefix = "ema_" if ema else ""
    assert found.metrics == {name: pytest.approx(result[prefix + name]) for name in METRICS}
    assert found.images == 13


def test_evaluate_prints_average_precision(whole):
    folder, result = whole
    done = ripple("evaluate", folder)
    assert done.exit_code == 0, done.output
    for heading in ("AP", "AP50", "AP75", "AP_S", "AP_M", "AP_L"):
        assert heading in done.output
    cells = [word.strip("│ ") for word in done.output.split() if word.strip("│ ")]
    after = cells[len(cells) - 1 - cells[::-1].index("13") :]
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium")
    assert after[1:6] == [f"{result[name]:.3f}" for name in names]
    assert after[6] == "–"


def test_evaluation_needs_no_pretrained_backbone(whole, monkeypatch):
    monkeypatch.setattr(backbone, "pretrained_weights", lambda name: pytest.fail("fetched"))
    started = replace(TINY, model=replace(TINY.model, pretrained_backbone=True))
    assert evaluate(find_weights(whole[0]), started).images == 13


def test_predict_draws_boxes_and_prints_objects(whole, tmp_path):
    folder, _ = whole
    pictures = shapes.Shapes(2, seed=5)
    one, same_name = tmp_path / "one.png", tmp_path / "other" / "one.png"
    same_name.parent.mkdir()
    pictures[0][0].save(one)
    pictures[1][0].save(same_name)
    words = ("--threshold", 0, "--output", tmp_path / "drawn")
    done = ripple("predict", folder, one, same_name, *words)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["one-2.png", "one.png"]
    rows = re.findall(r"(circle|square|triangle) +│ +(0\.\d\d) ", done.output)
    assert len(rows) == 2 * 3 * TINY.model.queries
    scores = [float(score) for _, score in rows[: len(rows) // 2]]
    assert scores == sorted(scores, reverse=True)
    with Image.open(tmp_path / "drawn/one.png") as drawn, Image.open(one) as original:
        assert drawn.size == original.size
        assert drawn.tobytes() != original.tobytes()
    done = ripple("predict", folder, one, "--threshold", 1, "--output", tmp_path / "nothing")
    with Image.open(tmp_path / "nothing/one.png") as drawn, Image.open(one) as original:
        assert drawn.tobytes() == original.tobytes()
    assert "does not exist" in str(ripple("predict", folder, "no.png", *words).exception)


def test_predictions_are_in_pixels_of_the_picture(whole):
    finder = ObjectFinder(find_weights(whole[0]))
    picture = shapes.Shapes(1, seed=5)[0][0]
    found = finder(picture)
    larger = finder(picture.resize((2 * picture.width, 2 * picture.height)))
    assert (larger["boxes"][0] / found["boxes"][0]).mean() == pytest.approx(2, rel=0.1)


def test_results_of_detectors_and_classifiers_are_gathered(whole, tmp_path):
    digits = find_recipe("cifar100-ripple-tiny4").smoke_run()
    run(tmp_path / "classifier", digits)
    path = tmp_path / "results.csv"
    done = ripple("results", whole[0], tmp_path / "classifier", "--output", path)
    assert done.exit_code == 0, done.output
    detector, classifier = csv.DictReader(path.open())
    assert float(detector["ap50"]) == pytest.approx(whole[1]["ap50"], abs=1e-3)
    assert detector["ap_large"] == detector["top1"] == classifier["ap"] == ""
    assert detector["changes"] == "not a recipe of this package"
    assert float(classifier["top1"]) >= 0


def write_coco(root, count=4, classes=("circle", "square", "triangle")):
    """Pictures of shapes as a folder in COCO's format, the same for both splits."""
    pictures = shapes.Shapes(count, seed=3)
    truth = pictures.ground_truth()
    for image, name in zip(truth["categories"], classes, strict=True):
        image["name"] = name
    for image in truth["images"]:
        image["file_name"] = f"{image['id']}.png"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}.json").write_text(json.dumps(truth))
        for index in range(count):
            pictures[index][0].save(root / split / f"{index}.png")


def test_a_folder_in_cocos_format_is_trained_on_by_workers(tmp_path):
    write_coco(tmp_path)
    data = replace(TINY.data, name="coco", root=str(tmp_path))
    hardware = replace(TINY.hardware, workers=1)
    result = run(tmp_path / "run", replace(TINY, data=data, hardware=hardware))
    assert result["steps"] == 4
    assert 0 <= result["ap"] <= 1
    wrong = replace(data, num_classes=80)
    with pytest.raises(ValueError, match=r"data.num_classes=80; coco has 3 classes: circle, squ"):
        run(tmp_path / "other", replace(TINY, data=wrong))
    write_coco(tmp_path / "renamed", classes=("ball", "box", "tent"))
    other = replace(TINY, data=replace(data, root=str(tmp_path / "renamed")))
    with pytest.raises(DataError, match=r"trained on other classes \(circle.* than .*ball"):
        evaluate(find_weights(tmp_path / "run"), other)


def test_what_is_missing_is_named(tmp_path):
    missing = replace(TINY, data=replace(TINY.data, name="coco", root=str(tmp_path / "none")))
    with pytest.raises(DataError, match="annotations were looked for in .*none"):
        run(tmp_path / "run", missing)
    with pytest.raises(ValueError, match="there is no detector 'smca_riple_resnet18'"):
        run(tmp_path / "run", replace(TINY, model=replace(TINY.model, name="smca_riple_resnet18")))


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_detector_overfits_four_pictures(system, tmp_path):
    write_coco(tmp_path)
    recipe = find_recipe(f"shapes-{system.replace('_', '-')}")
    data = replace(recipe.data, name="coco", root=str(tmp_path))
    recipe = replace(
        recipe,
        data=data,
        augmentation=replace(recipe.augmentation, flip=0.0),
        optimizer=replace(recipe.optimizer, warmup_epochs=20),
        epochs=500,
        batch_size=4,
        validate_every=500,
    )
    assert run(tmp_path / "run", recipe)["ap"] >= 0.9


@pytest.mark.slow
def test_the_recipe_of_shapes_learns(tmp_path):
    assert run(tmp_path / "run", find_recipe("shapes-smca-ripple"))["ap50"] >= 0.5
