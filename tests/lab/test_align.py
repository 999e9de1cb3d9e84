"""Converted models learn what their softmax models did."""

import copy
import hashlib
import importlib
import json
import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save, save_file
from transformers import Dinov2Config, Dinov2Model

from processes import in_two_ranks, ripple
from ripple_attention.convert import convert, converted
from ripple_lab.align import align, errors, plan
from ripple_lab.align.align import load
from ripple_lab.align.calibrate import calibrate
from ripple_lab.align.lessons import listening
from ripple_lab.align.models import Photos, find_photos, load_pretrained
from ripple_lab.files import write_csv
from ripple_lab.results import read_csv
from ripple_lab.train.lock import only_process_at
from ripple_lab.train.weights import read_weights, write_weights

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def teacher():
    torch.manual_seed(0)
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 64}
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, dynamic_img_size=True, **small
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def batches(count=2, seed=0):
    """Smooth images, as photos are; not all square."""
    generator = torch.Generator().manual_seed(seed)
    coarse = [torch.randn(2, 3, 4, 4, generator=generator) for _ in range(count)]
    sizes = [(64, 64), (48, 80)]
    return [
        torch.nn.functional.interpolate(x, size=sizes[i % 2], mode="bicubic")
        for i, x in enumerate(coarse)
    ]


def student(blocks="global"):
    model = copy.deepcopy(teacher())
    convert(model, blocks, max_distance=1)
    return model


def test_each_block_comes_nearer_to_its_teacher_and_its_projections_stay():
    model, unseen = student(), batches(seed=1)
    before, weights = errors(model, teacher(), unseen), copy.deepcopy(model.state_dict())
    rows = align(model, teacher(), batches(), steps=25)
    after = errors(model, teacher(), unseen)
    assert before.keys() == after.keys() == {name for name, _ in converted(model)}
    assert all(after[name] < 0.8 * before[name] for name in before)
    assert [row["step"] for row in rows] == [*range(1, 26)]
    changed = {k for k, x in model.state_dict().items() if not torch.equal(x, weights[k])}
    assert changed and all(".ripple." in name for name in changed)


@pytest.mark.parametrize("rates", [(0.0, 0.0), (1e-2, 0.0), (0.0, 1e-3)])
@pytest.mark.parametrize("stage", ["block_steps", "feature_steps"])
def test_a_second_alignment_goes_on_from_the_first_at_a_rate_for_each_kind(stage, rates):
    model, by = student(), teacher()
    align(model, by, batches(), steps=2)
    weights = copy.deepcopy(model.state_dict())
    named = dict(zip(("learning_rate", "tuning_rate"), rates, strict=True))
    align(model, by, batches(seed=2), steps=0, **{stage: 1}, **named)
    changed = [k for k, x in model.state_dict().items() if not torch.equal(x, weights[k])]
    learned = {".ripple." in name for name in changed}
    assert learned == {kind for kind, rate in zip((True, False), rates, strict=True) if rate}


def test_projections_and_features_learn_when_they_are_asked_to():
    model = student([1])
    weights = copy.deepcopy(model.state_dict())
    rows = align(model, teacher(), batches(), steps=1, block_steps=2, feature_steps=12)
    changed = {k for k, x in model.state_dict().items() if not torch.equal(x, weights[k])}
    assert {"blocks.1.attn.qkv.weight", "blocks.1.attn.proj.bias"} <= changed
    assert all(name.startswith("blocks.1.attn.") for name in changed)
    ends = [row["features"] for row in rows if row["stage"] == "features"]
    assert len(ends) == 12 and ends[-2] < ends[0]


def test_lessons_that_are_kept_save_the_teacher_its_passes_and_change_nothing():
    errors, passes = [], []
    for kept in (False, True):
        by, calls = teacher(), []
        by.blocks[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        steps = {"steps": 4, "feature_steps": 4}
        rows = align(student([1]), by, batches(), **steps, keep_lessons=kept)
        errors.append([row.get("features", row.get("blocks.1.attn")) for row in rows])
        passes.append(len(calls))
    assert passes == [2 + 4 + 4, 2 + 2]  # the first two calibrate
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_an_aligned_model_is_as_trainable_as_before():
    model, by = student([1]), teacher()
    model.train()
    model.blocks[0].requires_grad_(False)
    align(model, by, batches(), steps=1)
    assert model.training and not by.training
    assert all(p.requires_grad for p in by.parameters())
    learns = {p.requires_grad for p in model.blocks[0].parameters()}
    assert learns == {False} and model.blocks[1].attn.qkv.weight.requires_grad


class StopError(Exception):
    pass


class Stopping(list):
    """Two batches that end an alignment as a signal would, in its third step."""

    passes = 0  # the first one calibrates

    def __iter__(self):
        self.passes += 1
        yield self[0]
        if self.passes == 3:
            raise StopError
        yield self[1]


def test_a_stopped_alignment_goes_on_as_if_nothing_had_happened(tmp_path):
    by, path = teacher().double(), tmp_path / "align.safetensors"
    images = [batch.double() for batch in batches()]
    steps = {"steps": 5, "block_steps": 2}
    whole, stopped, resumed = (student().double() for _ in range(3))
    rows = align(whole, by, images, **steps)
    with pytest.raises(StopError):
        align(stopped, by, Stopping(images), **steps, checkpoint=path)
    assert len(load(path, stopped)[2]) == 3 and [*tmp_path.iterdir()] == [path]
    again = align(resumed, by, images, **steps, checkpoint=path)
    assert [row["step"] for row in again] == [row["step"] for row in rows]
    for name, x in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], x)
    before = copy.deepcopy(resumed.state_dict())  # what is finished stays as it is
    align(resumed, by, images, **steps, checkpoint=path)
    assert all(torch.equal(x, before[name]) for name, x in resumed.state_dict().items())


def test_an_alignment_that_runs_out_of_time_goes_on(tmp_path):
    by, path = teacher().double(), tmp_path / "align.safetensors"
    images = [batch.double() for batch in batches()]
    steps = {"steps": 2, "block_steps": 2}
    whole, parted = student().double(), student().double()
    rows, calls = align(whole, by, images, **steps), 0
    again = []
    while len(again) < 4:
        again = align(parted, by, images, **steps, checkpoint=path, seconds=0)
        calls += 1
    assert calls == 4 and [row["step"] for row in again] == [row["step"] for row in rows]
    for name, x in whole.state_dict().items():
        torch.testing.assert_close(parted.state_dict()[name], x)


def test_calibration_in_half_precision_finds_the_same_scale():
    scales = []
    for half in (False, True):
        model, by = student([1]), teacher()
        with listening(model, by) as lessons, torch.no_grad():
            by(batches()[0])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            calibrate(model.blocks[1].attn, [lessons["blocks.1.attn"]])
        scales.append(model.blocks[1].attn.ripple.far_scale.weight.detach())
    assert float((scales[1] - scales[0]).norm() / scales[0].norm()) < 0.05


def test_photos_that_a_device_keeps_are_the_same(words):
    pretrained = load_pretrained("test_vit", words[-1], side=96)
    paths, _ = find_photos(words[1])
    read, kept = (Photos(paths, pretrained, 2, where) for where in (None, torch.device("cpu")))
    assert len(read) == len(kept) == 2
    assert all(torch.equal(*pair) for pair in zip(read, kept, strict=True))


@pytest.mark.parametrize(
    ("model", "by", "images", "named"),
    [
        (teacher, teacher, batches, "convert"),
        (student, student, batches, "teacher"),
        (student, teacher, lambda: iter(batches()), "list or a DataLoader"),
        (student, teacher, list, "no batches"),
    ],
)
def test_what_cannot_be_aligned_is_refused(model, by, images, named):
    with pytest.raises(ValueError, match=named):
        align(model(), by(), images(), steps=1)


def test_off_a_screen_progress_is_a_few_lines_with_the_error_of_each_block(capsys):
    align(student(), teacher(), batches(), steps=20, console=Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all("blocks.0.attn 0." in line and "blocks.1.attn 0." in line for line in lines)


def test_a_plan_leaves_the_model_alone_and_tells_the_error_of_each_block():
    model = teacher()
    before = copy.deepcopy(model.state_dict())
    report, forecasts = plan(model, batches(), batches(seed=1), steps=15, max_distance=1)
    assert not any(converted(model)) and len(report.blocks) == 2
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [forecast.index for forecast in forecasts] == [0, 1]
    assert all(0 < forecast.after < forecast.before for forecast in forecasts)


@pytest.fixture
def words(tmp_path):
    """Photos and a small model's weights, as the commands take them."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    (tmp_path / "photos").mkdir()
    generator = np.random.default_rng(0)
    for number in range(4):
        pixels = generator.integers(0, 256, (6, 5, 3), np.uint8)
        picture = Image.fromarray(pixels).resize((50, 60), Image.Resampling.BICUBIC)
        picture.save(tmp_path / "photos" / f"{number}.jpg")
    return ["test_vit", tmp_path / "photos", "--weights", tmp_path / "weights.safetensors"]


def test_the_command_convert_plans(words):
    done = ripple("convert", *words, "--plan", "--steps", 2, "--blocks", "0,3", "--side", 96)
    assert done.exit_code == 0, done.output
    assert "blocks.3.attn" in done.output and "not chosen" in done.output
    assert "after 2 steps" in done.output


def test_weights_that_a_file_lacks_are_named(words):
    weights = load_file(words[-1])
    save_file({k: x for k, x in weights.items() if k != "blocks.1.attn.proj.bias"}, words[-1])
    done = ripple("convert", *words)
    assert done.exit_code == 0
    assert "lacks 1 weights of test_vit, which stay random: blocks.1.attn.proj.bias" in (
        " ".join(done.output.split())
    )


def test_the_command_align_writes_a_model_that_loads(tmp_path, words):
    output = tmp_path / "new" / "ripples.safetensors"
    settings = ("--blocks", "1,2", "--steps", 2, "--block-steps", 1, "--feature-steps", 1)
    done = ripple("align", *words, "--output", output, *settings)
    assert done.exit_code == 0, done.output
    assert sorted(path.suffix for path in output.parent.iterdir()) == [".json", ".safetensors"]
    model = timm.create_model("test_vit")
    convert(model, **json.loads(output.with_suffix(".json").read_text()))
    model.load_state_dict(load_file(output), strict=True)
    old = load_file(words[-1])
    changed = {name for name, x in old.items() if not torch.equal(x, model.state_dict()[name])}
    assert changed and all(
        name.startswith(("blocks.1.attn.", "blocks.2.attn.")) for name in changed
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--blocks", "1,x"), "1,x"),
        (("--blocks", "9"), "numbered from 0"),
        (("--near", "hard"), "hard"),
        (("--count", "1"), "count"),
    ],
)
def test_the_commands_say_what_was_wrong(words, change, told):
    done = ripple("convert", *words, "--plan", *change)
    assert done.exit_code != 0 and told in f"{done.output}{done.exception}"


def test_the_weights_that_align_writes_carry_a_checksum_that_is_looked_at(tmp_path, words):
    output, again = tmp_path / "ripples.safetensors", tmp_path / "again.safetensors"
    done = ripple("align", *words, "--output", output, "--blocks", "1", "--steps", 0)
    assert done.exit_code == 0 and f"Wrote {output} and" in done.output
    weights, metadata = read_weights(output)
    assert json.loads(metadata["ripples"])["blocks"] == [1]
    write_weights(again, dict(reversed(weights.items())), metadata)
    whole = output.read_bytes()
    assert whole == again.read_bytes()
    middle = len(whole) // 2
    output.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    done = ripple("convert", "test_vit", "--weights", output)
    assert str(output) in str(done.exception) and "checksum" in str(done.exception)


class Code:
    """What runs where a file is unpickled without care."""

    def __reduce__(self):
        return pytest.fail, ("code of a file was run",)


def pickled(content):
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("w.safetensors", b"", "cannot be read as safetensors"),
        ("w.safetensors", b"hello, this is none", "cannot be read as safetensors"),
        ("w.pth", pickle.dumps(Code()), "cannot be read as weights"),
        ("w.pth", pickled({"model": Code()}), "cannot be read as weights"),
        ("w.pth", pickled([1, 2]), "cannot be read as weights"),
        ("w.pth", pickled({"a": 5}), "none of its names"),
        ("w.pth", pickled({"cls_token": torch.ones(3)}), "1 of another shape"),
        (
            "w.pth",
            pickled({"cls_token": torch.ones(1, 1, 64), "\x1b": torch.ones(3)}),
            "unexpected",
        ),
        ("w.pth", None, "no file of weights"),
    ],
)
def test_weights_that_are_damaged_or_hostile_are_refused_in_one_line(tmp_path, name, content, told):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, RuntimeError), match=told) as refused:
        load_pretrained("test_vit", path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_photo_that_cannot_be_read_is_named(words):
    (words[1] / "9.png").write_bytes(b"no picture")
    error = ripple("convert", *words, "--plan", "--steps", 0).exception
    assert isinstance(error, ValueError) and str(words[1] / "9.png") in str(error)


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "code", "another", "weights alone"])
def test_a_damaged_checkpoint_of_an_alignment_is_refused(tmp_path, harm):
    path, model = tmp_path / "align.safetensors", student([1])
    align(model, teacher(), batches(), steps=1, checkpoint=path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "flipped": whole[:-999] + bytes([whole[-999] ^ 8]) + whole[-998:],
            "cut": whole[:-7],
            "empty": b"",
            "code": pickled({"model": Code()}),
            "another": whole,
            "weights alone": save(model.state_dict()),
        }[harm]
    )
    other = student([0]) if harm == "another" else student([1])
    with pytest.raises(RuntimeError, match=f"{path} is .*Start anew"):
        align(other, teacher(), batches(), steps=2, checkpoint=path)


def test_an_alignment_that_diverges_stops_and_keeps_what_was_sound(tmp_path):
    path = tmp_path / "align.safetensors"
    images = [*batches(), torch.full((2, 3, 64, 64), torch.nan)]
    model = student([1])
    with pytest.raises(RuntimeError, match="diverged.*batch 2"):
        align(model, teacher(), Later(images), steps=9, checkpoint=path)
    assert len(load(path, model)[2]) == 2
    assert all(x.isfinite().all() for x in model.state_dict().values())
    with pytest.raises(RuntimeError, match=r"infinities or NaN from blocks\.1\.attn"):
        align(student([1]), teacher(), images[2:], steps=1)


class Later(list):
    """Batches of which a calibration sees the first two alone."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        yield from self[: 2 if self.passes == 1 else None]


def test_one_process_at_a_time_writes_a_file(tmp_path, words):
    output = tmp_path / "ripples.safetensors"
    with only_process_at(output):
        error = ripple("align", *words, "--output", output, "--steps", 0).exception
    assert isinstance(error, ValueError) and f"process {os.getpid()} on" in str(error)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "5"},
        {"config.json": "[" * 10**5},
        {"config.json": '{"model_type": "evil", "auto_map": {"AutoModel": "evil.Evil"}}'},
        {"config.json": '{"model_type": "dinov2", "num_attention_heads": "x"}'},
        {"model.safetensors": "damaged"},
        {"preprocessor_config.json": "5"},
        {"preprocessor_config.json": '{"image_processor_type": "E", "image_mean": [1]}'},
        {"preprocessor_config.json": '{"image_processor_type": "E", "auto_map": {"AutoImage'
         'Processor": "evil.Evil"}}'},
    ],
)  # fmt: skip
def test_a_folder_of_transformers_that_is_damaged_or_hostile_is_refused(tmp_path, files):
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    Dinov2Model(config).save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a folder was run')")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read as a model") as refused:
        load_pretrained(str(tmp_path))
    assert "\n" not in str(refused.value)


def aligned_in_a_rank(rank, port):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.manual_seed(rank)  # what is new begins differently, until it is shared
    model = copy.deepcopy(teacher())
    convert(model, max_distance=1)
    align(model, teacher(), batches(seed=rank), steps=3)
    torch.distributed.destroy_process_group()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_processes_that_align_together_have_one_model():
    one, other = in_two_ranks(aligned_in_a_rank)
    assert one == other


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Runs a file of benchmarks/; gives the rows of its CSV."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def run(name, *words):
        results = tmp_path / f"{name}.csv"
        command = [name, *words, "--results", results]
        monkeypatch.setattr("sys.argv", [str(word) for word in command])
        importlib.import_module(name).main()
        return read_csv(results)

    return run


def test_windows_attend_within_windows(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    windows = importlib.import_module("sam2_align").Windows(4)
    q, k, v = torch.randn(3, 2, 8 * 12, 3, 5)
    out = windows(q, k, v, grid_size=(8, 12)).unflatten(1, (8, 12))
    one = (x.unflatten(1, (8, 12))[:, 4:, 8:].flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*one)
    torch.testing.assert_close(out[:, 4:, 8:].flatten(1, 2).transpose(1, 2), expected)


def test_the_picture_of_sam2_has_a_dot_for_every_block_of_every_variant(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    picture = importlib.import_module("sam2_picture")
    rows = [
        {"variant": variant, "embedding_error": error}
        | {f"blocks.{block}.attn": block * error for block in picture.BLOCKS}
        for variant, error in (("r4", 0.2), ("paper", 0.3))
    ]
    write_csv(rows, tmp_path / "errors.csv")
    figure, ax = picture.plt.subplots()
    picture.draw_errors(ax, tmp_path / "errors.csv")
    dots = [line.get_xydata().tolist() for line in ax.get_lines()]
    expected = [[[block * 0.3, 0], [block * 0.2, 1]] for block in picture.BLOCKS]  # worst below
    np.testing.assert_allclose(dots, expected)
    picture.plt.close(figure)


@pytest.mark.slow
def test_variants_of_sam2_are_aligned_measured_and_timed(tmp_path, words, benchmark):
    torch.manual_seed(0)
    model = timm.create_model("sam2_hiera_tiny", num_classes=0)
    save_file(model.state_dict(), tmp_path / "trunk.safetensors")
    widths = {f"neck.convs.{3 - i}.conv": 96 * 2**i for i in range(4)}
    neck = {f"{name}.weight": torch.randn(256, width, 1, 1) for name, width in widths.items()}
    neck |= {f"{name}.bias": torch.zeros(256) for name in widths}
    for i, width in enumerate((32, 64)):
        name = f"sam_mask_decoder.conv_s{i}"
        neck |= {
            f"{name}.weight": torch.randn(width, 256, 1, 1),
            f"{name}.bias": torch.zeros(width),
        }
    save_file(neck | {"no_mem_embed": torch.zeros(256)}, tmp_path / "neck.safetensors")
    for split in ("train", "val"):
        shutil.copytree(words[1], tmp_path / split)
    common = (tmp_path, tmp_path, "--photos", 2, "--batch", 1, "--work", tmp_path / "work")
    steps = ("--steps", 2, "--block-steps", 1, "--feature-steps", 1, "--only", "r4-far,windows")
    rows = benchmark("sam2_align", *common, *steps, "--side", 256)
    assert [row["variant"] for row in rows] == ["r4-far", "windows"]
    assert [row["block_steps"] for row in rows] == [1, 3]
    far, windows = (row["embedding_error"] for row in rows)
    assert 0 < far < 1 and windows < 1e-4  # one window holds all of this grid
    assert benchmark("sam2_align", *common, *steps, "--side", 256) == rows  # nothing is done twice
    (tmp_path / "sam2_align.csv").unlink()
    rows = benchmark("sam2_align", *common, "--only", "r4-far", "--side", 512, "--more", 1)
    assert [row["more_steps"] for row in rows] == [0, 1]
    rows = benchmark(
        "sam2_speed",
        *("--device", "cpu", "--sides", 256, "--only", "r4", "--rounds", 1, "--no-compile"),
    )
    assert len(rows) == 6 and all(row["status"] == "ok" and row["median_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_a_deit_of_cifar100_is_converted_aligned_and_tuned(benchmark):
    rows = benchmark("cifar100_convert", "--quick")
    assert [row["stage"] for row in rows] == ["softmax", "converted", "aligned", "tuned"]
    assert 0 <= rows[-1]["top1"] <= 100
