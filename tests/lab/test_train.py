"""The training engine: what a run writes, survives and refuses."""

import csv
import json
import os
import shutil
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from timm.optim import create_optimizer_v2

from processes import Ripple, ripple_on_two_devices
from ripple_attention.spatial_weights import halt
from ripple_lab.data.augment import Augmentation
from ripple_lab.data.images import DataError
from ripple_lab.data.synthetic import synthetic_images
from ripple_lab.divergence import uniform_divergence
from ripple_lab.recipes import find_recipe
from ripple_lab.train import recorder
from ripple_lab.train.checkpoint import (
    CHECKSUMS,
    CheckpointError,
    checksums,
    find_weights,
    folder_of_step,
    read_description,
    steps_kept,
)
from ripple_lab.train.classification import (
    ClassificationRecipe,
    DataSpec,
    Mixing,
    ModelSpec,
)
from ripple_lab.train.classifier import Classifier
from ripple_lab.train.evaluate import evaluate
from ripple_lab.train.module import learning_rate
from ripple_lab.train.preemption import TIME_IS_UP, Preemption, StoppedError
from ripple_lab.train.recipe import MAY_CHANGE, Hardware, OptimizerSpec, Recipe
from ripple_lab.train.recorder import DivergedError, gradient_norms, read_metrics
from ripple_lab.train.ripples import halting_group
from ripple_lab.train.run import train

STEPS_PER_EPOCH, EPOCHS = 6, 3

SMALL = ClassificationRecipe(
    name="small",
    model=ModelSpec("ripple_tiny4_patch2_32", patch_size=8, width=24, heads=2, depth=2),
    data=DataSpec("synthetic", num_classes=10, count=26),
    augmentation=Augmentation(auto_augment="rand-m9-mstd0.5-inc1"),
    optimizer=OptimizerSpec(lr=1e-3, warmup_epochs=1),
    epochs=EPOCHS,
    batch_size=4,
    ema_decay=0.9,
    log_every=2,
    hardware=Hardware("cpu", precision="32-true"),
)


def run(folder, recipe=SMALL, resume=False):
    return train(recipe, folder, Console(file=StringIO()), resume)


def weights(folder):
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "ema")}


def assert_same_weights(one, other):
    for name, tensors in weights(one).items():
        for key, value in tensors.items():
            assert torch.equal(value, weights(other)[name][key]), (name, key)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder)


def schedule(folder):
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return [(row["step"], row["learning_rate"]) for row in rows]


def test_a_run_folder_holds_what_a_reader_needs(whole):
    folder, result = whole
    assert Recipe.read(folder / "recipe.json") == SMALL
    (session,) = json.loads((folder / "environment.json").read_text())
    assert torch.__version__.startswith(session["torch"])
    assert {"git_revision", "hardware", "command", "started", "timm"} <= session.keys()
    rows = read_metrics(folder / "metrics.jsonl")
    columns = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [int(row["step"]) for row in columns] == [row["step"] for row in rows]
    assert rows[1]["kind"] == "train"
    assert float(columns[1]["loss"]) == rows[1]["loss"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["step"] for row in evaluations] == [6, 12, 18]
    assert all(0 <= row["top1"] <= row["top5"] <= 100 for row in evaluations)
    assert list((folder / "tensorboard").iterdir())
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["steps"] == STEPS_PER_EPOCH * EPOCHS
    assert result["top1"] == evaluations[-1]["top1"]
    assert result["ema_top5"] == evaluations[-1]["ema_top5"]
    assert list(steps_kept(folder / "checkpoints")) == [18]
    trainer = torch.load(folder / "checkpoints/step-00000018/trainer.pt", weights_only=True)
    assert trainer["global_step"] == 18
    recipe, classes = read_description(folder / "model.safetensors")
    assert recipe == SMALL
    assert classes[3] == "class 3"


def test_ripples_are_written_down_after_every_epoch(whole):
    folder = whole[0]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "ripples"]
    lines = read_metrics(folder / "ripples.jsonl")
    assert [row["epoch"] for row in rows] == [line["epoch"] for line in lines] == [0, 1, 2, 3]
    for row, line in zip(rows, lines, strict=True):
        weights = torch.tensor(line["weights"])
        assert weights.shape == (2, 2, row["groups"]) == (2, 2, 5)
        assert torch.allclose(weights.sum(-1), torch.ones(2, 2), atol=1e-5)
        assert row["jsd"] == pytest.approx((row["jsd/layer_0"] + row["jsd/layer_1"]) / 2)
        assert 0 < row["halting_group"] <= 5
    assert rows[0]["jsd"] == pytest.approx(uniform_divergence(5), abs=0.01)  # they start uniform
    assert rows[-1]["jsd"] != rows[0]["jsd"]


@pytest.mark.parametrize(("threshold", "group"), [(0.35, 1), (0.25, 2), (0.15, 3), (0.05, 4)])
def test_a_ripple_halts_where_less_than_the_threshold_is_left(threshold, group):
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1])  # left: 0.3, 0.2, 0.1
    assert halting_group(weights, threshold) == group
    halted = halt(weights, threshold, "share")
    assert halting_group(halted, threshold) == group


def test_the_schedule_is_linear_then_a_cosine(whole):
    folder, _ = whole
    expected = [
        (step, pytest.approx(learning_rate(step - 1, STEPS_PER_EPOCH, EPOCHS, SMALL.optimizer)))
        for step in range(2, 19, 2)
    ]
    assert schedule(folder) == expected


@pytest.mark.parametrize("decayed", [True, False])
def test_feature_maps_may_be_left_out_of_weight_decay(decayed):
    recipe = find_recipe("cifar100-short-ripple-tiny4")
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, decay_feature_maps=decayed))
    module = Classifier(recipe)
    spec = recipe.optimizer
    groups = create_optimizer_v2(
        module.parameter_groups(), opt="adamw", lr=spec.lr, weight_decay=spec.weight_decay
    ).param_groups
    names = {id(p): name for name, p in module.model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    for name, p in module.model.named_parameters():
        map_matrix = "feature_map" in name and p.ndim > 1
        exempt = p.ndim == 1 or "pos_embed" in name or (map_matrix and not decayed)
        assert decay[name] == (0 if exempt else spec.weight_decay), name
    assert sum("feature_map" in name for name in decay) == 4 * 3


def test_the_mean_of_the_weights_follows_them(tmp_path):
    def mean_after(decay):
        folder = tmp_path / str(decay)
        run(folder, replace(SMALL, epochs=2, ema_decay=decay))
        return load_file(folder / "ema.safetensors"), load_file(folder / "model.safetensors")

    mean, last = mean_after(0.0)
    assert all(torch.equal(mean[key], last[key]) for key in last)
    mean, last = mean_after(0.9)
    assert not torch.equal(mean["head.weight"], last["head.weight"])


def test_gradient_norms_are_of_the_steps_after_warm_up(tmp_path):
    path = tmp_path / "metrics.jsonl"
    norms = [(0.5, 90.0), (1.5, 12.0), (2.0, 1.0), (2.5, 3.0)]
    rows = [
        {"kind": "train", "step": 1, "epoch": e, "gradient_norm": n, "gradient_norm_max": n}
        | {"images_per_second": 1.0}
        for e, n in norms
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gradient_norms(path, warmup_epochs=1)
    assert found == {
        "gradient_norm_median": 3.0,
        "gradient_norm_max": 12.0,
        "gradient_norm_spikes": 1,
    }


def test_a_run_does_not_overwrite_another(whole):
    folder, _ = whole
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds a run already: --resume"):
        run(folder)
    other = replace(SMALL, seed=1, optimizer=replace(SMALL.optimizer, lr=0.5))
    with pytest.raises(ValueError, match=r"optimizer.lr: 0.001 → 0.5; seed: 0 → 1"):
        run(folder, other, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == before


def changed(recipe, field, value):
    """The recipe with another value of a field, named as on the command line."""
    part, _, name = field.rpartition(".")
    if not part:
        return replace(recipe, **{name: value})
    return replace(recipe, **{part: replace(getattr(recipe, part), **{name: value})})


OTHER_VALUES = {
    "data.root": "elsewhere",
    "data.download": True,
    "validate_every": 2,
    "checkpoint_minutes": 1.0,
    "log_every": 5,
    "model.implementation": "table",
}


@pytest.mark.parametrize(("field", "value"), OTHER_VALUES.items())
def test_a_run_may_go_on_with_other_values_of_what_decides_nothing(field, value, whole):
    assert OTHER_VALUES.keys() == MAY_CHANGE
    folder, result = whole
    assert run(folder, changed(SMALL, field, value), resume=True) == result


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("seed", 1),
        ("ema_decay", 0.5),
        ("epochs", 4),
        ("data.source", "hfds/other"),
        ("data.in_memory", False),
        ("model.drop_path", 0.2),
    ],
)
def test_a_run_may_not_go_on_with_other_values_of_what_decides(field, value, whole):
    other = changed(changed(SMALL, field, value), "log_every", 5)
    with pytest.raises(ValueError, match=rf"has another recipe.* \({field}: \S* → {value}\); give"):
        run(whole[0], other, resume=True)


def test_a_run_without_its_data_leaves_no_folder(tmp_path):
    missing = replace(SMALL, data=DataSpec("cifar100", root=str(tmp_path / "none")))
    with pytest.raises(DataError, match="were looked for in .*none.* and are not there"):
        run(tmp_path / "run", missing)
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_ended_is_not_run_again(whole):
    folder, result = whole
    assert run(folder, resume=True) == result


@pytest.mark.parametrize("step", [1, 5, 6, 7, 12, 17])
def test_a_run_may_be_cut_after_any_step(step, whole, tmp_path, monkeypatch):
    original = Preemption.on_train_batch_end

    def batch_end(self, trainer, *rest):
        if trainer.global_step == step:
            self._ask(signal.SIGTERM, None)
        original(self, trainer, *rest)

    monkeypatch.setattr(Preemption, "on_train_batch_end", batch_end)
    with pytest.raises(StoppedError, match=f"Stopped at step {step} because it was told to"):
        run(tmp_path / "cut")
    monkeypatch.undo()
    assert list(steps_kept(tmp_path / "cut/checkpoints")) == [step]
    run(tmp_path / "cut", resume=True)
    assert_same_weights(tmp_path / "cut", whole[0])
    evaluations = [
        [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] != "train"]
        for folder in (tmp_path / "cut", whole[0])
    ]
    assert evaluations[0] == evaluations[1]


def test_a_run_without_end_of_time_stops_in_time(tmp_path):
    hardware = replace(SMALL.hardware, stop_after_minutes=0.0)
    with pytest.raises(StoppedError, match="because its time is up") as stopped:
        run(tmp_path / "run", replace(SMALL, hardware=hardware))
    assert stopped.value.signal_number == TIME_IS_UP
    assert list(steps_kept(tmp_path / "run/checkpoints")) == [1]
    run(tmp_path / "run", resume=True)  # hardware may change


@pytest.mark.parametrize("names", [["SIGHUP"], ["SIGTERM", "SIGINT"], ["SIGINT", "SIGHUP"]])
def test_any_signal_that_asks_to_stop_keeps_the_checkpoint(names, whole, tmp_path, monkeypatch):
    original = Preemption.on_train_batch_end

    def batch_end(self, trainer, *rest):
        if trainer.global_step == 4:
            for name in names:
                os.kill(os.getpid(), signal.Signals[name])
        original(self, trainer, *rest)

    monkeypatch.setattr(Preemption, "on_train_batch_end", batch_end)
    # A shell's background jobs ignore SIGINT, and nohup ignores SIGHUP. A run keeps to that.
    before = {name: signal.signal(signal.Signals[name], signal.SIG_DFL) for name in names}
    try:
        with pytest.raises(StoppedError, match="the checkpoint is") as stopped:
            run(tmp_path / "run")
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
    assert stopped.value.signal_number == signal.Signals[names[-1]]
    assert list(steps_kept(tmp_path / "run/checkpoints")) == [4]


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tmp_path, monkeypatch):
    original = Classifier.training_step

    def training_step(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        return loss * float("nan") if self.global_step == 9 else loss

    monkeypatch.setattr(Classifier, "training_step", training_step)
    recipe = replace(SMALL, log_every=4, checkpoint_minutes=0.0)
    with pytest.raises(DivergedError, match="the loss of step 10 is nan"):
        run(tmp_path / "run", recipe)
    assert max(steps_kept(tmp_path / "run/checkpoints")) == 9
    for tensors in weights(folder_of_step(tmp_path / "run/checkpoints", 9)).values():
        assert all(torch.isfinite(value).all() for value in tensors.values())


def test_two_processes_do_what_one_does_and_stop_together(tmp_path):
    recipe = replace(
        SMALL,
        model=replace(SMALL.model, drop_path=0.0),
        augmentation=Augmentation("none", flip=0.0, auto_augment=None, color_jitter=0, erasing=0),
        mixing=Mixing(mixup=0.0, cutmix=0.0),
    )
    run(tmp_path / "one", recipe)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    words = ["train", tmp_path / "recipe.json", "--output", tmp_path / "two"]
    words += ["--hardware.devices", "2"]
    stop = ["--hardware.stop-after-minutes", "0"]
    stopped = Ripple(tmp_path, *words, *stop)  # Lightning starts the second process
    assert stopped.wait() == 0, stopped.errors.read_text()
    assert stopped.errors.read_text().count("because its time is up") == 1
    assert list(steps_kept(tmp_path / "two/checkpoints")) == [2]
    ripple_on_two_devices(tmp_path, *words, "--resume")
    one, two = (  # ripples are those of the first process's images
        [row for row in read_metrics(tmp_path / n / "metrics.jsonl") if row["kind"] != "ripples"]
        for n in ("one", "two")
    )
    assert len(one) == len(two)
    for row, other in zip(one, two, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"images_per_second", "kind"}:
            assert row[name] == pytest.approx(other[name], rel=1e-4), (name, row["step"])
    result = json.loads((tmp_path / "two/result.json").read_text())
    assert result["devices"] == 2
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4)


def test_a_last_checkpoint_that_was_damaged_is_made_again(whole, tmp_path):
    folder = tmp_path / "run"
    recipe = replace(SMALL, checkpoint_minutes=0.0)
    run(folder, recipe)
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    path = folder_of_step(folder / "checkpoints", 18) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="Going back to .*step-00000017"):
        run(folder, recipe, resume=True)
    assert_same_weights(folder, whole[0])


def test_a_damaged_result_is_named_and_made_again_as_it_says(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    (folder / "result.json").write_text("[]")
    with pytest.raises(ValueError, match=r"result\.json is not .*: remove it, .* makes it anew"):
        run(folder, resume=True)
    (folder / "result.json").unlink()
    made = run(folder, Recipe.read(folder / "recipe.json"), resume=True)
    assert made == json.loads((folder / "result.json").read_text())
    assert made["top1"] == whole[1]["top1"]
    assert_same_weights(folder, whole[0])


def test_checkpoints_that_are_all_damaged_are_named(tmp_path):
    folder = tmp_path / "run"
    stop_at(folder, SMALL, 3)
    path = folder_of_step(folder / "checkpoints", 3) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match="no checkpoint in .*model.safetensors does not match its checksum"
    ):
        run(folder, resume=True)


def test_trainer_state_is_not_executed(tmp_path):
    folder = tmp_path / "run"
    stop_at(folder, SMALL, 3)

    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    checkpoint = folder_of_step(folder / "checkpoints", 3)
    torch.save({"state": Bad()}, checkpoint / "trainer.pt")
    (checkpoint / CHECKSUMS).write_text(checksums(checkpoint))
    with pytest.raises(CheckpointError, match="is not the trainer's state"):
        run(folder, resume=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("ema", [False, True])
def test_evaluation_finds_what_training_ended_with(whole, ema):
    folder, result = whole
    found = evaluate(find_weights(folder, ema), SMALL)
    assert found.metrics["top1"] == pytest.approx(result["ema_top1" if ema else "top1"])
    assert found.images == 26


def test_evaluation_on_other_classes_is_refused(whole):
    other = replace(SMALL, data=DataSpec("digits", num_classes=10))
    with pytest.raises(DataError, match="trained on other classes .*class 0.* than .*0, 1, 2"):
        evaluate(find_weights(whole[0]), other)


def test_hardware_that_is_not_there_is_named(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    hardware = replace(SMALL.hardware, accelerator="cuda")
    with pytest.raises(ValueError, match="hardware.accelerator='cuda' .* cannot be had here"):
        run(tmp_path / "run", replace(SMALL, hardware=hardware))


def test_rates_after_a_cut_are_rates(tmp_path):
    stop_at(tmp_path / "run", SMALL, 3)
    run(tmp_path / "run", resume=True)
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"]
    assert min(row["images_per_second"] for row in rows) > 1


def test_foreign_weights_are_refused(whole, tmp_path):
    foreign, cut = tmp_path / "foreign.safetensors", tmp_path / "cut.safetensors"
    save_file({"x": torch.zeros(3)}, foreign)
    with pytest.raises(CheckpointError, match="was not written by `ripple train`"):
        read_description(foreign)
    cut.write_bytes((whole[0] / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors, it may be cut short"):
        read_description(cut)
    with pytest.raises(CheckpointError, match="nothing is none of these: it does not exist$"):
        find_weights(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"does not exist\. did you mean embedded\?"):
        find_weights(Path("embeded"))
    with pytest.raises(CheckpointError, match="holds ema.safetensors"):
        find_weights(tmp_path, ema=True)
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path, Path("embedded")):
        with pytest.raises(CheckpointError, match=f"{path} has no running mean.*leave out --ema"):
            find_weights(path, ema=True)
    assert find_weights(whole[0]) == whole[0] / "model.safetensors"


def test_gradients_are_clipped_and_their_norm_is_that_before():
    module = Classifier(replace(SMALL, optimizer=replace(SMALL.optimizer, clip=0.5)))
    for parameter in module.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    count = sum(p.numel() for p in module.model.parameters())
    module.configure_gradient_clipping(None)
    assert module.gradient_norm == pytest.approx(0.01 * count**0.5, rel=1e-4)
    clipped = sum(p.grad.square().sum() for p in module.model.parameters()) ** 0.5
    assert clipped == pytest.approx(0.5, rel=1e-4)
    module = Classifier(replace(SMALL, optimizer=replace(SMALL.optimizer, clip=None)))
    module.model.head.bias.grad = torch.full_like(module.model.head.bias, 7.0)
    module.configure_gradient_clipping(None)
    assert (module.model.head.bias.grad == 7).all()


def test_a_terminal_shows_rate_and_time_left(tmp_path):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    train(replace(SMALL, epochs=2), tmp_path / "run", console)
    shown = screen.getvalue()
    assert "epoch 2/2" in shown
    assert "12/12" in shown
    assert "images/s, loss" in shown
    assert "left:" in shown


@pytest.mark.filterwarnings("default:.*cannot be decoded")
def test_folders_resume_exactly_and_a_damaged_image_stops_nothing(tmp_path):
    synthetic = synthetic_images(24, 32, 2, seed=0)
    for split in ("train", "val"):
        for index in range(12):
            image, label = synthetic[index]
            path = tmp_path / split / synthetic.classes[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        path.write_bytes(path.read_bytes()[:100])
    data = DataSpec("imagenet", root=str(tmp_path), num_classes=2, in_memory=False)
    recipe = replace(SMALL, data=data, epochs=2, hardware=replace(SMALL.hardware, workers=1))
    result = run(tmp_path / "run", recipe)
    assert result["steps"] == 6
    assert result["damaged_images"] == 2
    stop_at(tmp_path / "cut", recipe, 4)
    run(tmp_path / "cut", replace(recipe, hardware=replace(SMALL.hardware, workers=0)), resume=True)
    assert_same_weights(tmp_path / "cut", tmp_path / "run")
    recipe, classes = read_description(tmp_path / "run/model.safetensors")
    assert classes == ("class 0", "class 1")
    wrong = replace(recipe, data=replace(data, num_classes=3))
    with pytest.raises(ValueError, match="data.num_classes=3; imagenet has 2 classes"):
        run(tmp_path / "other", wrong)


def write_class_folders(root, names=("class 0", "class 1")):
    for split in ("train", "val"):
        for index, (image, label) in enumerate(synthetic_images(12, 32, 2, seed=0)):
            path = root / split / names[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def test_a_run_goes_on_exactly_where_its_data_moved(tmp_path):
    write_class_folders(tmp_path / "old")
    data = DataSpec("imagenet", root=str(tmp_path / "old"), num_classes=2, in_memory=False)
    hardware = replace(SMALL.hardware, workers=0)
    recipe = replace(SMALL, data=data, validate_every=3, hardware=hardware)
    run(tmp_path / "whole", recipe)
    stop_at(tmp_path / "cut", recipe, 4)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(DataError, match="images were looked for in .*old"):
        run(tmp_path / "cut", recipe, resume=True)
    write_class_folders(tmp_path / "other", ("cat", "dog"))
    other = changed(recipe, "data.root", str(tmp_path / "other"))
    with pytest.raises(DataError, match="with, class 0, class 1.*other are cat, dog.*: name the"):
        run(tmp_path / "cut", other, resume=True)
    assert Recipe.read(tmp_path / "cut/recipe.json") == recipe
    moved = changed(recipe, "data.root", str(tmp_path / "new"))
    moved = replace(moved, validate_every=1, log_every=3, checkpoint_minutes=5.0)
    run(tmp_path / "cut", moved, resume=True)
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    assert Recipe.read(tmp_path / "cut/recipe.json") == moved
    assert read_description(tmp_path / "cut/model.safetensors")[0] == moved
    steps = {"train": [], "evaluation": [], "ripples": []}
    for row in read_metrics(tmp_path / "cut/metrics.jsonl"):
        steps[row["kind"]].append(row["step"])
    assert (steps["train"], steps["evaluation"]) == ([2, 3, 4, 6, 9], [6, 9])


def test_csv_follows_the_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "top1": 3}\n{"step": 3, "lo')
    recorder.Recorder(tmp_path).write_csv()
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,loss,top1", "1,2.5,", "2,,3"]
    recorder.forget_after(path, 1)
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}]


def stop_at(folder, recipe, step):
    """Runs until a step, and leaves checkpoints."""
    original = Preemption.on_train_batch_end

    def batch_end(self, trainer, *rest):
        if trainer.global_step == step:
            self._ask(signal.SIGTERM, None)
        original(self, trainer, *rest)

    Preemption.on_train_batch_end = batch_end
    try:
        with pytest.raises(StoppedError):
            run(folder, recipe)
    finally:
        Preemption.on_train_batch_end = original
