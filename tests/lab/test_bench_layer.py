"""`ripple bench layer`: what it compares, that it checks before it times, and what it keeps."""

import csv
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from inputs import relative_error
from processes import ripple
from ripple_attention import Partition, RippleAttention, SoftmaxAttention
from ripple_lab.bench import attentions, layer, measure
from ripple_lab.bench.attentions import (
    ByDefinition,
    FlexAttention,
    Shape,
    System,
    WindowAttention,
    near,
    same_window,
    systems,
)
from ripple_lab.commands.bench import layer_shapes

SMALL = Shape(5, 7, 2, 16, 2)
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.01)


def run(**options):
    return list(layer.run(layer.LayerBenchmark(shapes=(SMALL,), rounds=1, **options)))


def add_system(monkeypatch, system):
    monkeypatch.setattr(layer, "systems", lambda *_: {"changed": system, **systems()})


def test_layers_are_checked_timed_written_and_drawn(tmp_path):
    path, figure = tmp_path / "layer.csv", tmp_path / "layer.png"
    words = ("--shapes", "36,2,24/2; 3x5,1,32/2", "--rounds", 1, "--output", path)
    done = ripple("bench", "layer", *words, "--maps", "learned,elu,unheard")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(path.open()))
    names = list(systems(maps=("learned", "elu", "unheard")))
    assert [row["system"] for row in rows] == 4 * names
    assert [(row["tokens"], row["pass"]) for row in rows[:: len(names)]] == [
        (tokens, step) for tokens in ("36", "15") for step in layer.PASSES
    ]
    for row in rows:
        if row["system"] in ("flex 7x7", "ripple R 4, unheard"):
            assert row["status"].startswith("skipped: ") and not row["median_ms"]
            continue
        assert row["status"] == "ok" and row["timed_as"] == "calls"
        assert float(row["median_ms"]) > 0 and float(row["peak_mb"]) > 0
        if row["system"] != attentions.FLOOR:
            assert max(float(row["relative_error"]), float(row["gradient_error"])) < 1e-5
        if row["system"].startswith("ripple"):
            assert row["operators"] == "tiled"
    for said in ("36 × 2", "24/2", "1.00 / 1.00 ×", "no feature map 'unheard'"):
        assert said in done.output
    assert ripple("bench", "plot", path, figure).exit_code == 0
    assert figure.read_bytes()[:4] == PNG


def test_ripples_vary_one_thing_at_a_time():
    names = [name for name in systems() if name.startswith("ripple")]
    assert names == [
        "ripple R 4",
        "ripple R 8",
        "ripple R 4, elu",
        "ripple R 4, relu",
        "ripple R 4, t2r",
        "ripple R 4, hedgehog",
        "ripple R 4, fixed weights",
        "ripple R 4, softmax weights",
        "ripple R 4, truncated weights",
    ]
    assert "ripple R 2, elu, fixed weights" in systems((2,), ("elu",), ("fixed",))


def test_usual_shapes_are_understood():
    on_gpu, on_cpu = (layer_shapes(layer.SHAPES[kind]) for kind in ("cuda", "cpu"))
    assert {shape.head_dim for shape in on_gpu} == {32, 64, 72, 80, 96, 128}
    assert all(shape.head_dim * shape.heads == shape.dim for shape in (*on_gpu, *on_cpu))
    assert max(shape.tokens for shape in on_cpu) <= 1024


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("grid", [(14, 14), (15, 3), (1, 29)])
def test_windows_and_neighbourhoods_match_their_definitions(grid):
    shape = Shape(*grid, 2, 16, 2)
    for fast, definition in (
        (WindowAttention(16, 2), ByDefinition(16, 2, same_window, padded=True)),
        (FlexAttention(shape, compiled=False), ByDefinition(16, 2, near)),
        (SoftmaxAttention(16, 2), ByDefinition(16, 2)),
    ):
        definition.load_state_dict(fast.state_dict())
        x = torch.randn(2, *grid, 16)
        with torch.no_grad():
            assert relative_error(fast(x), definition(x)) < 1e-5


def test_a_definition_in_parts_is_the_same(monkeypatch):
    definition, x = ByDefinition(16, 2, near), torch.randn(2, 5, 7, 16)
    expected = definition(x)
    monkeypatch.setattr(attentions, "SCORES_AT_ONCE", 2 * 2 * 35 * 4)  # four queries
    assert relative_error(definition(x), expected) < 1e-6


@pytest.mark.parametrize(("token", "others"), [((10, 10), 49), ((0, 0), 16), ((19, 10), 28)])
def test_a_neighbourhood_ends_where_the_grid_does(token, others):
    rows, columns = torch.arange(20)[:, None], torch.arange(20)
    assert int(near(*map(torch.tensor, token), rows, columns).sum()) == others


def wrong_radius(shape):
    return RippleAttention(shape.dim, shape.heads, partition=Partition((0, 1, 2, 4)))


class WithoutKeysGradient(SoftmaxAttention):
    def attend(self, q, k, v, key_padding_mask):
        return super().attend(q, k.detach(), v, key_padding_mask)


@pytest.mark.parametrize(
    ("make", "like", "message"),
    [
        (wrong_radius, "ripple R 4", "its output is"),
        (lambda shape: WithoutKeysGradient(shape.dim, shape.heads), "softmax", "its gradient of x"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_wrong_is_not_timed_and_says_by_how_much(monkeypatch, make, like, message, dtype):
    add_system(monkeypatch, replace(systems()[like], make=make))
    rows = run(only=("changed", "linear"), dtype=dtype)
    for row in rows:
        if row["system"] == "changed":
            assert row["status"].startswith(f"wrong: {message}") and "at most" in row["status"]
            assert row["median_ms"] is None
        else:
            assert row["status"] == "ok" and row["median_ms"] > 0


def test_a_command_with_a_wrong_or_failed_system_fails_after_the_others(monkeypatch, tmp_path):
    def fail(shape):
        raise RuntimeError("no such kernel\nand more")

    add_system(monkeypatch, System(fail))
    path = tmp_path / "layer.csv"
    words = ("--shapes", "9,1,8/2", "--rounds", 1, "--only", "changed,softmax", "--output", path)
    done = ripple("bench", "layer", *words)
    assert done.exit_code == 1
    assert "changed: failed: RuntimeError: no such kernel" in done.output
    rows = {row["system"]: row for row in csv.DictReader(path.open())}
    assert rows["softmax"]["status"] == "ok"


def test_what_has_no_room_says_so(monkeypatch):
    def fail(shape):
        raise torch.OutOfMemoryError("CUDA out of memory")

    add_system(monkeypatch, System(fail))
    assert {row["status"] for row in run(only=("changed",))} == {"does not fit", "ok"}


def test_nothing_is_started_after_the_budget(tmp_path):
    path = tmp_path / "layer.csv"
    words = ("--shapes", "9,1,8/2", "--only", "softmax", "--budget", 0, "--output", path)
    assert ripple("bench", "layer", *words).exit_code == 0
    statuses = {row["status"] for row in csv.DictReader(path.open())}
    assert statuses == {"skipped: the budget of 0 s was used up"}
    refused = ripple("bench", "plot", path, tmp_path / "layer.png")
    assert refused.exit_code != 0 and "no system was timed" in str(refused.exception)


def test_a_run_cut_off_keeps_what_it_measured(monkeypatch, tmp_path):
    check, path = layer.check, tmp_path / "layer.csv"

    def cut_off(system, made, shape, config):
        if shape.tokens == 16:
            raise KeyboardInterrupt
        return check(system, made, shape, config)

    monkeypatch.setattr(layer, "check", cut_off)
    words = ("--shapes", "9,1,8/2; 16,1,8/2", "--rounds", 1, "--only", "linear", "--output", path)
    assert ripple("bench", "layer", *words).exit_code == 130
    assert {row["tokens"] for row in csv.DictReader(path.open())} == {"9"}


def test_a_graph_holds_several_steps_whose_time_is_that_of_one(monkeypatch):
    ran = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "seconds", lambda step, device: 1e-4)
    gpu = torch.device("cuda")
    replay, count, said = layer.as_graph(lambda: ran.append(1), gpu)
    assert (replay(), count, said, len(ran)) == ("replayed", 5, "graph of 5", 5)

    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    assert layer.as_graph(refuse, gpu) == (refuse, 1, "calls")
    monkeypatch.setattr(layer, "as_graph", lambda step, device: (step, 4, "graph of 4"))
    monkeypatch.setattr(
        measure, "interleaved_seconds", lambda steps, *_: {name: [0.2] for name in steps}
    )
    assert {row["median_ms"] for row in run(only=("linear",))} == {50.0}


class FakeGraph:
    def replay(self):
        return "replayed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shapes", "15,1,8/2"), "tokens a square number"),
        (("--shapes", "16,1,9/2"), "channels a multiple of heads"),
        (("--shapes", "16,0,8/2"), "tokens,batch,channels/heads"),
        (("--shapes", "16x,1,8/2"), "tokens,batch,channels/heads"),
        (("--shapes", ";"), "there is no shape"),
        (("--reaches", "4,none"), "reaches are whole numbers"),
        (("--weights", "stick"), "stick-breaking, fixed, softmax, truncated"),
        (("--dtype", "int8"), "'float32', 'bfloat16', 'float16'"),
        (("--only", "rippel"), "did you mean ripple"),
    ],
)
def test_bad_options_are_refused(words, message):
    done = ripple("bench", "layer", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
