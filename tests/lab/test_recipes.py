"""Recipes: every one starts, says what it shows, and takes only what fits."""

import json
import re
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from ripple_attention.feature_maps import FEATURE_MAPS
from ripple_attention.partition import logarithmic
from ripple_lab import paper
from ripple_lab.commands import train as commands
from ripple_lab.recipes import all_recipes, find_recipe
from ripple_lab.train.classification import ModelSpec
from ripple_lab.train.module import TrainedModule
from ripple_lab.train.network import create_model
from ripple_lab.train.recipe import Recipe, differences
from ripple_lab.train.run import train

NAMES = list(all_recipes())


def those_that_start_apart():
    """Of recipes that differ in their schedule alone, which a smoke run has none of, the first."""
    apart = {}
    for name in NAMES:
        run = asdict(find_recipe(name).smoke_run())
        for schedule in ("name", "optimizer", "ema_decay", "validate_every"):
            del run[schedule]
        apart.setdefault(json.dumps(run), name)
    return list(apart.values())


@pytest.mark.parametrize("name", those_that_start_apart())
def test_every_recipe_starts(name, tmp_path, monkeypatch):
    unused = []
    original = TrainedModule.optimizer_step

    def optimizer_step(self, *args, **kwargs):
        original(self, *args, **kwargs)
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        unused.extend(n for n, p in trained if p.grad is None)

    monkeypatch.setattr(TrainedModule, "optimizer_step", optimizer_step)
    recipe = find_recipe(name)
    result = train(recipe.smoke_run(), tmp_path, Console(file=StringIO()))
    assert result["steps"] == 2
    if recipe.task == "classification":
        assert 0 <= result["top1"] <= result["top5"] <= 100
    else:
        assert 0 <= result["ap"] <= result["ap50"] <= 1
    assert not unused  # several processes would wait for their gradients


def test_every_recipe_is_listed_with_its_command():
    for name, listed in all_recipes().items():
        assert listed.shows
        assert listed.command.startswith(f"ripple train {name}")


def test_every_row_of_the_papers_tables_has_a_recipe():
    assert paper.ACCURACY.keys() | paper.AVERAGE_PRECISION.keys() <= set(NAMES)


def test_recipes_have_the_papers_settings():
    imagenet, cifar = find_recipe("imagenet-ripple-tiny"), find_recipe("cifar100-ripple-tiny")
    assert (imagenet.batch_size, imagenet.optimizer.lr, imagenet.epochs) == (1024, 1e-3, 300)
    assert (cifar.batch_size, cifar.optimizer.lr, cifar.epochs) == (512, 5e-4, 300)
    for recipe in (imagenet, cifar):
        assert recipe.model.drop_path == recipe.label_smoothing == 0.1
        assert recipe.mixing.mixup == 0.8
        assert recipe.mixing.cutmix == 1.0
        assert recipe.augmentation.auto_augment == "rand-m9-mstd0.5-inc1"
        assert recipe.augmentation.erasing == 0.25
        assert recipe.optimizer.weight_decay == 0.05
        assert recipe.optimizer.warmup_epochs == 5


def test_detection_recipes_have_the_papers_settings():
    for system in ("smca", "smca-la", "smca-ripple"):
        for epochs, drop in ((50, 40), (108, 80)):
            recipe = find_recipe(f"coco-{system}-{epochs}")
            model, optimizer = recipe.model, recipe.optimizer
            assert model.name == system.replace("-", "_") + "_resnet50"
            assert (recipe.epochs, recipe.batch_size) == (epochs, 16)
            assert (optimizer.lr, optimizer.backbone_lr, optimizer.drops) == (1e-4, 1e-5, (drop,))
            assert (optimizer.weight_decay, optimizer.clip, model.dropout) == (1e-4, 0.1, 0.1)
            assert (model.encoder_layers, model.decoder_layers, model.queries) == (6, 6, 300)
            assert model.pretrained_backbone and model.fixed_stages == 2


def test_a_recipe_survives_json():
    for listed in all_recipes().values():
        assert Recipe.from_json(listed.recipe.to_json()) == listed.recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": "many"}, "Recipe.epochs in the text: 'many' will not do"),
        ({"epoch": 3}, "Recipe in the text has no field epoch: did you mean epochs? Its fields"),
        ({"epochs": 0}, "epochs must be at least 1; got epochs=0"),
        ({"seed": 2**32}, "seed must be at most 4294967295; got seed=4294967296"),
        ({"hardware": {"stop_after_minutes": -1}}, "stop_after_minutes must be at least 0; got"),
        ({"batch_size": 3}, "must be a multiple of 2; got batch_size=3 for 1 devices"),
        ({"model": {"weights": "heavy"}}, "ModelSpec.weights in the text: 'heavy' will not do"),
        ({"optimizer": 3}, "OptimizerSpec in the text must be an object; got 3"),
        ({"epochs": 5}, "the warm-up must end before the run does"),
        ({"ema_decay": 2.0}, "ema_decay must lie between 0 and 1; got ema_decay=2.0"),
        ({"optimizer": {"clip": -1.0}}, "lr and clip must be above 0; got lr=0.0005, clip=-1.0"),
        ({"model": {"depth": 0}}, "depth must be at least 1; got depth=0"),
        ({"hardware": {"precision": "fp8"}}, "Hardware.precision in the text: 'fp8' will not do"),
        ({"task": "song"}, "task in the text is one of classification, detection; got 'song'"),
        ({"optimizer": {"drops": ["end"]}}, "OptimizerSpec.drops in the text: ('end',) will not"),
        ({"optimizer": {"drops": [0]}}, "drops are epochs, 1 or later; got drops=(0,)"),
        ({"optimizer": {"backbone_lr": 1e-5}}, "OptimizerSpec in the text has no field backbone_l"),
        ({"task": "detection", "mixing": {}}, "DetectionRecipe in the text has no field mixing"),
        ({"task": "detection", "model": {"queries": 0}}, "queries must be at least 1; got queries"),
        ({"task": "detection", "loss": {"alpha": 2.0}}, "alpha must lie between 0 and 1"),
        ({"task": "detection", "loss": {"giou": -1.0}}, "giou must be at least 0; got giou=-1.0"),
        (
            {"task": "detection", "hardware": {"compile": True}},
            "hardware.compile is for classifiers",
        ),
        (
            {"task": "detection", "data": {"evaluation_scale": 2000}},
            "data.evaluation_scale must not exceed augmentation.max_size; got 2000 and 1333",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.from_json(json.dumps(change))


def test_text_that_is_no_recipe_is_refused():
    with pytest.raises(ValueError, match="a recipe is JSON; the text is not"):
        Recipe.from_json("epochs: 3")


def test_fields_are_overridden_on_the_command_line():
    recipe = find_recipe("cifar100-ripple-tiny")
    words = "--optimizer.lr 2e-3 --model.weights fixed --ema-decay None --hardware.compile"
    changed = commands.override(recipe, words.split(), "ripple train")
    assert differences(recipe, changed) == [
        "model.weights: None → fixed",
        "optimizer.lr: 0.0005 → 0.002",
        "ema_decay: 0.99996 → None",
    ]
    assert changed.hardware.compile


def test_fields_of_detection_are_overridden_on_the_command_line():
    recipe = find_recipe("coco-smca-ripple-50")
    words = "--optimizer.drops 20 30 --model.queries 100 --augmentation.scales 64 96 --loss.l1 3"
    changed = commands.override(recipe, words.split(), "ripple train")
    assert [change.split(":")[0] for change in differences(recipe, changed)] == [
        "model.queries",
        "augmentation.scales",
        "optimizer.drops",
        "loss.l1",
    ]
    assert changed.optimizer.drops == (20, 30)
    assert changed.augmentation.scales == (64, 96)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer.lr fast", "could not convert string to float"),
        ("--epochs 2.5", "invalid literal for int"),
        ("--model.weights heavy", "invalid choice 'heavy'"),
        ("--optimiser.lr 1", "--optimizer.lr"),
        ("--epochs 0", "epochs must be at least 1"),
    ],
)
def test_an_override_of_the_wrong_type_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        commands.override(find_recipe("digits"), words.split(), "ripple train digits")
    assert error.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_what_a_recipe_says_of_its_model_reaches_the_layers():
    words = ["--model.class-token", "--model.num-features", "48", "--model.scaling", "scaled"]
    recipe = commands.override(find_recipe("cifar100-deit-la-tiny4"), words, "ripple train")
    model = create_model(recipe.model, 100)
    assert model.pos_embed.shape == (1, 257, 192) and model.global_pool == "token"
    maps = [block.attn.feature_map for block in model.blocks]
    assert {(x.num_features, x.scaling) for x in maps} == {(48, "scaled")}


def test_what_a_recipe_says_of_ripples_reaches_every_layer_of_a_detectors_encoder():
    words = "--model.max-distance 7 --model.partition logarithmic --model.weights truncated"
    words += " --model.halt-threshold 0.05 --model.feature-map dpfp --model.scaling unit"
    recipe = commands.override(find_recipe("shapes-smca-ripple"), words.split(), "ripple train")
    layers = recipe.create_model().encoder.layers
    assert len(layers) == 2
    for layer in layers:
        weights, phi = layer.attn.spatial_weights, layer.attn.feature_map
        assert layer.attn.partition == logarithmic(7)
        assert (weights.kind, weights.halt_threshold) == ("truncated", 0.05)
        assert (type(phi), phi.scaling) == (FEATURE_MAPS["dpfp"], "unit")


@pytest.mark.parametrize(
    "spec", [ModelSpec("ripple_tiny4_patch2_32", patch_size=5), ModelSpec("resnet18")]
)
def test_a_model_that_cannot_be_made_is_named(spec):
    with pytest.raises(ValueError, match=f"{spec.name} cannot be made with"):
        create_model(spec, 10)


def test_options_that_a_model_does_not_use_are_refused():
    with pytest.raises(ValueError, match="has no ripples: leave out model.max_distance"):
        create_model(ModelSpec("deit6_tiny_patch2_32", max_distance=3), 10)


def test_differences_leave_hardware_aside():
    recipe = find_recipe("digits")
    other = replace(recipe, seed=3, hardware=replace(recipe.hardware, workers=1))
    assert differences(recipe, other) == ["seed: 0 → 3"]
