"""Recipes: every one starts, says what it shows, and takes only what fits."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from ripple_attention import paper
from ripple_attention.recipes import all_recipes, find_recipe
from ripple_attention.train import commands
from ripple_attention.train.classifier import Classifier, create_model
from ripple_attention.train.recipe import ModelSpec, Recipe, differences, smoke_run
from ripple_attention.train.run import train

NAMES = list(all_recipes())


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_starts(name, tmp_path, monkeypatch):
    unused = []
    original = Classifier.optimizer_step

    def optimizer_step(self, *args, **kwargs):
        original(self, *args, **kwargs)
        unused.extend(n for n, p in self.model.named_parameters() if p.grad is None)

    monkeypatch.setattr(Classifier, "optimizer_step", optimizer_step)
    result = train(smoke_run(find_recipe(name)), tmp_path, Console(file=StringIO()))
    assert result["steps"] == 2
    assert 0 <= result["top1"] <= result["top5"] <= 100
    assert not unused  # several processes would wait for their gradients


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_what_it_shows_and_how_it_is_run(name):
    listed = all_recipes()[name]
    assert re.match(r"Table \d, |Stability of training, |Digits: ", listed.claim)
    assert f"    ripple train {name}" in listed.text
    assert ("Not yet run." in listed.text) != ("top-1" in listed.text)


def test_every_row_of_the_papers_tables_has_a_recipe():
    assert paper.ACCURACY.keys() <= set(NAMES)


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


def test_a_recipe_survives_json():
    for listed in all_recipes().values():
        assert Recipe.from_json(listed.recipe.to_json()) == listed.recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": "many"}, "Recipe.epochs in the text: 'many' will not do"),
        ({"epoch": 3}, "Recipe in the text has no field epoch; its fields are name, model"),
        ({"epochs": 0}, "epochs must be at least 1; got epochs=0"),
        ({"batch_size": 3}, "must be a multiple of 2; got batch_size=3 for 1 devices"),
        ({"model": {"weights": "heavy"}}, "ModelSpec.weights in the text: 'heavy' will not do"),
        ({"optimizer": 3}, "OptimizerSpec in the text must be an object; got 3"),
        ({"epochs": 5}, "the warm-up must end before the run does"),
        ({"ema_decay": 2.0}, "ema_decay must lie between 0 and 1; got ema_decay=2.0"),
        ({"optimizer": {"clip": -1.0}}, "lr and clip must be above 0; got lr=0.0005, clip=-1.0"),
        ({"model": {"depth": 0}}, "depth must be at least 1; got depth=0"),
        ({"hardware": {"precision": "fp8"}}, "Hardware.precision in the text: 'fp8' will not do"),
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


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean cifar100-ripple-tiny"):
        find_recipe("cifar100-riple-tiny")


@pytest.mark.parametrize(
    "spec", [ModelSpec("ripple_tiny4_patch2_32", patch_size=5), ModelSpec("resnet18")]
)
def test_a_model_that_cannot_be_made_is_named(spec):
    with pytest.raises(ValueError, match=f"{spec.name} cannot be made with"):
        create_model(spec, 10)


def test_options_that_a_model_does_not_use_are_refused():
    with pytest.raises(ValueError, match="has no ripples: leave out model.max_distance"):
        create_model(ModelSpec("deit6_tiny_patch2_32", max_distance=3), 10)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="model.name must be known to timm; got 'ripple_tinyy'"):
        create_model(ModelSpec("ripple_tinyy"), 10)


def test_differences_leave_hardware_aside():
    recipe = find_recipe("digits")
    other = replace(recipe, seed=3, hardware=replace(recipe.hardware, workers=1))
    assert differences(recipe, other) == ["seed: 0 → 3"]
