"""`ripple bench`: what it compares, that it checks before it times, and what it keeps."""

import csv

import pytest
import torch

from inputs import relative_error
from processes import ripple
from ripple_attention import chebyshev
from ripple_lab import machine
from ripple_lab.bench import measure, model, op

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.01)


def test_bench_op_times_some_systems_alone(tmp_path):
    path = tmp_path / "op.csv"
    words = ("--sides", 5, "--rounds", 1, "--heads", 1, "--head-dim", 4, "--output", path)
    done = ripple("bench", "op", *words, "--only", "naive,linear attention")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    names = ["ripple naive", "linear attention"]
    assert list(dict.fromkeys(row["system"] for row in rows)) == [*names, op.FLOOR]
    assert all(row["relative_error"] for row in rows if row["system"] in names)


def test_bench_op_times_foveal_and_logarithmic_rings(tmp_path):
    path = tmp_path / "op.csv"
    words = ("--sides", 17, "--rounds", 1, "--heads", 1, "--head-dim", 4, "--output", path)
    for partition, missing in (("foveal", "ripple table"), ("logarithmic", "")):
        done = ripple("bench", "op", *words, "--partition", partition)
        assert done.exit_code == 0, done.output
        rows = list(csv.DictReader(path.open()))
        systems = {row["system"] for row in rows if row["status"] == "ok"}
        assert {"ripple tile sums", "ripple naive", op.THIN, "softmax SDPA"} <= systems - {missing}
        assert missing not in systems
        assert {row["partition"] for row in rows} == {partition}


def test_bench_op_checks_times_and_writes(tmp_path):
    path, figure = tmp_path / "op.csv", tmp_path / "op.png"
    words = ("--sides", "5,9", "--rounds", 1, "--heads", 2, "--head-dim", 8, "--output", path)
    done = ripple("bench", "op", *words)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    assert {row["system"] for row in rows} == {*op.systems(chebyshev(4)), op.FLOOR}
    assert {row["pass"] for row in rows} == set(op.PASSES)
    assert {row["tokens"] for row in rows} == {"25", "81"}
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["median_ms"]) > 0
        assert float(row["peak_mb"]) > 0 or row["system"] == op.FLOOR
        if not row["system"].startswith(("softmax", "floor")):
            assert float(row["relative_error"]) < 1e-5
    assert "81 tokens" in done.output
    assert ripple("bench", "plot", path, figure).exit_code == 0
    assert figure.read_bytes()[:4] == PNG


def test_bench_model_times_whole_models(tmp_path):
    path = tmp_path / "model.csv"
    words = ("--sides", "3", "--tokens-at-once", 9, "--rounds", 1, "--dtype", "float32")
    words += ("--device", "cpu", "--no-compiled", "--only", "R_max 4", "--output", path)
    done = ripple("bench", "model", *words)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    assert [row["pass"] for row in rows] == ["forward", "training step"]
    for row in rows:
        assert row["system"] == "ripple, R_max 4"
        assert row["tokens"] == "9"
        assert float(row["images_per_second"]) == pytest.approx(
            1e3 * int(row["batch"]) / float(row["median_ms"]), rel=1e-2
        )
    for picture in (tmp_path / "models.png", tmp_path / "models.svg"):
        assert ripple("bench", "plot", path, picture).exit_code == 0
    assert "training step, ms an image" in picture.read_text()
    assert ripple("bench", "model", "--only", "resnet").exit_code == 2


def test_bench_detection_times_encoders_and_detectors(tmp_path):
    path = tmp_path / "detection.csv"
    words = ("--grids", "2x3,3×2", "--image", "32x64", "--backbone", "resnet18", "--rounds", 1)
    words += ("--dtype", "float32", "--device", "cpu", "--padded", "--output", path)
    done = ripple("bench", "detection", *words)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    encoders = [row for row in rows if row["part"] == "encoder"]
    assert [(row["height"], row["width"]) for row in encoders[:: len(encoders) // 2]] == [
        ("2", "3"),
        ("3", "2"),
    ]
    assert {row["system"] for row in encoders} == {"softmax", "linear", "ripple"}
    assert [row["system"] for row in rows if row["part"] == "detector"] == [
        "smca_resnet18",
        "smca_la_resnet18",
        "smca_ripple_resnet18",
    ]
    assert all(row["status"] == "ok" and float(row["median_ms"]) > 0 for row in rows)
    assert "smca_ripple_resnet18" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grids", "25"), "height×width"),
        (("--grids", "0x4"), "height×width"),
        (("--backbone", "vgg"), "'resnet50', 'resnet18'"),
        (("--dtype", "int8"), "'float32', 'bfloat16', 'float16'"),
        (("--image", "8x8,9x9"), "one size of picture"),
        (("--grids", "none", "--image", "none"), "nothing to time"),
    ],
)
def test_bench_detection_refuses_bad_options(words, message):
    done = ripple("bench", "detection", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("name", model.SYSTEMS)
def test_every_system_of_bench_model_runs_on_its_grid(name):
    config = model.ModelBenchmark(device="cpu", dtype="float32", compile=False)
    model.make_step(name, 4, 1, "forward", config)()


def test_bench_model_takes_a_batch_and_a_width(tmp_path):
    path = tmp_path / "models.csv"
    words = ("--sides", "2,3", "--batch", 3, "--width", 12, "--device", "cpu", "--dtype", "float32")
    words += ("--no-compiled", "--rounds", 1, "--only", "DeiT-LA of 4 layers", "--output", path)
    done = ripple("bench", "model", *words, "--forward-alone")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    assert [(row["tokens"], row["batch"], row["embed_dim"]) for row in rows] == [
        ("4", "3", "12"), ("9", "3", "12")
    ]  # fmt: skip
    assert {row["pass"] for row in rows} == {"forward"}
    assert ripple("bench", "model", *words).exit_code == 0
    assert {row["pass"] for row in csv.DictReader(path.open())} == set(model.PASSES)
    usual, narrow = model.ModelBenchmark(device="cpu"), model.ModelBenchmark(device="cpu", width=96)
    assert model.default_path(usual) != model.default_path(narrow)
    done = ripple("bench", "model", "--width", 100)
    assert done.exit_code == 2 and "multiple of the 6 heads" in done.output


def test_bench_op_refuses_to_time_a_wrong_result(monkeypatch):
    real = op.systems

    def wrong(*arguments):
        return real(*arguments) | {"ripple table": lambda q, k, v, weights: v}

    monkeypatch.setattr(op, "systems", wrong)
    with pytest.raises(RuntimeError, match="ripple table disagrees .* nothing was timed"):
        list(op.run(op.OpBenchmark(sides=(5,), heads=1, head_dim=4)))


def test_bench_op_names_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda device: 100_000)
    rows = list(op.run(op.OpBenchmark(sides=(12,), heads=1, head_dim=4, rounds=1)))
    skipped = {row["system"] for row in rows if row["status"] != "ok"}
    assert skipped == {"ripple naive", "ripple table by autograd", "softmax with ripples"}
    assert all("needs about" in row["status"] for row in rows if row["system"] in skipped)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dtype", "int8"), "is not one of"),
        (("--sides", "14;32"), "whole numbers"),
        (("--sides", "0"), "whole numbers"),
        (("--max-distance", "0"), "greater than or equal"),
        (("--partition", "rings"), "is not one of 'chebyshev'"),
    ],
)
def test_bench_op_refuses_bad_options(words, message):
    done = ripple("bench", "op", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_table_by_autograd_is_the_same_function():
    config = op.OpBenchmark(heads=2, head_dim=4, dtype="float64")
    partition = chebyshev(4)
    inputs = op.make_inputs(config, 9, partition)
    systems = op.systems(partition)
    grads = {
        name: torch.autograd.grad(systems[name](*inputs).square().sum(), inputs)
        for name in ("ripple table by autograd", "ripple naive")
    }
    for ours, reference in zip(*grads.values(), strict=True):
        assert relative_error(ours, reference) < 1e-10


def test_peak_memory_is_what_is_held_at_a_time():
    def step():
        first = torch.empty(1_000_000)
        del first
        second = torch.empty(2_000_000)
        third = torch.empty(500_000)
        del second, third

    assert measure.peak_bytes(step, torch.device("cpu")) == pytest.approx(10_000_000, rel=0.01)
