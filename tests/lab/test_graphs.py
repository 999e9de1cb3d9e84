"""Training steps as CUDA graphs; without a GPU, all of it but the recording itself."""

from dataclasses import replace

import pytest
import torch
from test_train import SMALL, assert_same_weights, run, stop_at
from torch import nn

from ripple_lab.train import graphs, module
from ripple_lab.train.classifier import Classifier
from ripple_lab.train.detector import DetectorTraining
from ripple_lab.train.graphs import NotRecordableError, StepGraph, why_eager
from ripple_lab.train.recipe import Hardware
from ripple_lab.train.recorder import read_metrics

STEPS = 18
CUDA = torch.device("cuda")

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Played:
    """Records as `graphs.record` does, but plays by computing again, into the same tensors."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, compute, model):
        self.recorded += 1
        parameters = list(model.parameters())
        with torch.random.fork_rng(devices=[]):
            result = compute()
        gradients = [p.grad for p in parameters]

        def replay():
            self.replayed += 1
            attached = [p.grad for p in parameters]
            result.copy_(compute())
            for parameter, gradient, before in zip(parameters, gradients, attached, strict=True):
                gradient.copy_(parameter.grad)
                parameter.grad = before  # a graph does not know what Python calls a gradient

        return replay, result


@pytest.fixture
def played(monkeypatch):
    """Steps that are replayed on the CPU."""
    found = Played()
    monkeypatch.setattr(graphs, "record", found)
    monkeypatch.setattr(module, "why_eager", lambda *_: None)
    return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager") / "run"
    run(folder)
    return folder


def training_rows(folder):
    """What a run wrote down of its steps, but for its speed."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return [{name: row[name] for name in row if name != "images_per_second"} for row in rows]


@pytest.mark.parametrize(
    ("hardware", "device", "processes", "fixed_shapes", "reason"),
    [
        (Hardware(), CUDA, 1, True, None),
        (Hardware(compile=True, precision="32-true"), CUDA, 1, True, None),
        (Hardware(), torch.device("cpu"), 1, True, "that needs an NVIDIA GPU"),
        (Hardware(graphs=False), CUDA, 1, True, "hardware.graphs is off"),
        (Hardware(), CUDA, 1, False, "the images of a batch have sizes of their own"),
        (Hardware(devices=2), CUDA, 2, True, "several processes exchange their gradients"),
        (Hardware(precision="16-mixed"), CUDA, 1, True, "with 16-mixed, the scale of the loss"),
    ],
)
def test_steps_are_replayed_where_they_can_be(hardware, device, processes, fixed_shapes, reason):
    found = why_eager(hardware, device, processes, fixed_shapes)
    assert found is None if reason is None else found.startswith(reason)


def test_batches_of_classifiers_have_one_shape_and_those_of_detectors_many():
    assert Classifier.FIXED_SHAPES and not DetectorTraining.FIXED_SHAPES


def test_on_a_cpu_nothing_is_recorded_or_said(eager, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "record", None)
    run(tmp_path / "run")
    assert not caplog.records
    assert_same_weights(tmp_path / "run", eager)


def test_replayed_steps_are_those_of_a_run_without(eager, tmp_path, played):
    run(tmp_path / "run")
    assert (played.recorded, played.replayed) == (1, STEPS)
    assert_same_weights(tmp_path / "run", eager)
    assert training_rows(tmp_path / "run") == training_rows(eager)


@pytest.mark.parametrize("step", [1, 6, 11])
def test_a_replayed_run_may_be_cut_after_any_step(step, eager, tmp_path, played):
    stop_at(tmp_path / "cut", SMALL, step)
    run(tmp_path / "cut", resume=True)
    assert (played.recorded, played.replayed) == (2, STEPS)
    assert_same_weights(tmp_path / "cut", eager)


def test_a_step_that_cannot_be_recorded_is_made_as_ever_and_said_once(
    eager, tmp_path, monkeypatch, caplog
):
    def record(compute, model):
        with torch.random.fork_rng(devices=[]):
            compute()
        raise NotRecordableError("a step waits for the GPU, in model.py, line 7")

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(module, "why_eager", lambda *_: None)
    run(tmp_path / "run")
    assert [line.message for line in caplog.records] == [
        "Steps are not replayed as CUDA graphs: a step waits for the GPU, in model.py, line 7."
    ]
    assert_same_weights(tmp_path / "run", eager)


def make_step(trained, batch):
    """A step as Lightning makes it, up to its gradients."""
    loss = trained.training_step(batch, 0)
    trained.optimizer_zero_grad(0, 0, torch.optim.SGD(trained.model.parameters()))
    trained.backward(loss)
    return loss.detach(), [p.grad.clone() for p in trained.model.parameters()]


def test_a_batch_of_another_shape_is_not_replayed_and_changes_no_later_one(played):
    plain = replace(SMALL, mixing=replace(SMALL.mixing, mixup=0.0, cutmix=0.0))
    plain = replace(plain, model=replace(plain.model, drop_path=0.0))
    ours = Classifier(plain)
    theirs = Classifier(plain)
    theirs.load_state_dict(ours.state_dict())
    ours._graphs = True
    for size in (4, 3, 4, 4, 2, 4):
        batch = torch.randn(size, 3, 32, 32), torch.randint(10, (size,))
        loss, gradients = make_step(ours, batch)
        expected, reference = make_step(theirs, batch)
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, gradients, reference))
    assert (played.recorded, played.replayed) == (1, 4)


def test_a_loss_stays_what_it_was_when_the_next_batch_is_replayed(played):
    model = nn.Linear(3, 1)
    graph = StepGraph(model, lambda x: model(x).sum(), [torch.zeros(2, 3)])
    first = graph([torch.ones(2, 3)])
    before = first.clone()
    graph([torch.full((2, 3), 5.0)])
    assert torch.equal(first, before)


GPU = replace(SMALL, hardware=Hardware("cuda", precision="bf16-mixed"))
WITHOUT = replace(GPU, hardware=replace(GPU.hardware, graphs=False))


@on_a_gpu
def test_on_a_gpu_replayed_steps_draw_what_others_draw(tmp_path):
    """Crops, mixup and stochastic depth are on: other draws would give other losses."""
    run(tmp_path / "replayed", GPU)
    run(tmp_path / "eager", WITHOUT)
    ours, theirs = (training_rows(tmp_path / name) for name in ("replayed", "eager"))
    assert len(ours) == len(theirs) == STEPS // 2
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-3)


@on_a_gpu
@pytest.mark.parametrize("step", [5, 12])
def test_on_a_gpu_a_cut_run_goes_on_exactly(step, tmp_path):
    run(tmp_path / "whole", GPU)
    stop_at(tmp_path / "cut", GPU, step)
    run(tmp_path / "cut", GPU, resume=True)
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")


@on_a_gpu
def test_what_is_drawn_follows_the_seed_of_each_replay():
    layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    loss = lambda x: layer(x).square().mean()
    x = torch.randn(8, 64, device="cuda")
    torch.manual_seed(0)
    graph = StepGraph(layer, loss, [x])
    drawn = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))  # recording has drawn nothing
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(graph([x]))
        torch.manual_seed(seed)
        assert torch.equal(losses[-1], loss(x))
    assert torch.equal(losses[0], losses[2]) and not torch.equal(losses[0], losses[1])
    assert not torch.equal(graph([x]), graph([x]))  # nor does one replay repeat the other


@on_a_gpu
def test_recording_leaves_running_means_alone():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(16, 8, device="cuda")
    graph = StepGraph(layers[0], lambda x: layers[0](x).square().mean(), [x])
    for scale in (1.0, 2.0):
        graph([scale * x])
        layers[1](scale * x)
    for ours, theirs in zip(layers[0].buffers(), layers[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_a_gpu
def test_a_loss_that_waits_for_the_gpu_is_refused_and_named():
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    before = {name: value.clone() for name, value in layer.state_dict().items()}

    def loss(x):
        y = layer(x)
        return y.sum() * float(y.amax() > 0)

    with pytest.raises(NotRecordableError, match=r"waits for the GPU, in .*test_graphs.py, line"):
        StepGraph(layer, loss, [torch.randn(16, 8, device="cuda")])
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    torch.rand(3, device="cuda")  # the generator is as good as before
