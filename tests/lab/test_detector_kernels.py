"""Detectors by Triton kernels: interpreted on any machine, and as they are on a GPU."""

import warnings
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from test_detector import SMALL, TINY, assert_same, create, images, shaken

from kernels import interpreted, needs_triton
from ripple_attention import LinearAttention, RippleAttention, modules
from ripple_lab.bench import detection as bench
from ripple_lab.detection.loss import DetectionLoss

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WITH_KERNELS = SMALL[1:]  # softmax has PyTorch's


def by_kernels(model):
    """A list that gets one item for each call of an attention layer by fused kernels."""
    calls = []

    def counted(attend):
        def attend_fused(*arguments):
            calls.append(True)
            return attend(*arguments)

        return attend_fused

    for layer in model.encoder.layers:
        layer.attn._attend_fused = counted(layer.attn._attend_fused)
    return calls


def in_plain_operations(model):
    for layer in model.modules():
        if isinstance(layer, LinearAttention):
            layer.fuse = False
        if isinstance(layer, RippleAttention):
            layer.implementation = "tiled"
    return model


def assert_padding_changes_nothing(model, batch):
    """Each image alone and in the batch, by kernels; and the batch in plain operations."""
    calls = by_kernels(model)
    together = model(batch)
    for index, image in enumerate(batch):
        alone = model([image])
        assert_same(together, alone, index)
        assert alone["logits"].std(1).min() > 1e-3, "queries say all the same: this proves nothing"
    layers = len(model.encoder.layers)
    assert calls == [True] * layers * (1 + len(batch))
    calls.clear()
    plain = in_plain_operations(model)(batch)
    assert not calls
    for index in range(len(batch)):
        alone = {key: plain[key][index : index + 1] for key in ("logits", "boxes")}
        earlier = [{key: x[key][index : index + 1] for key in x} for x in plain["auxiliary"]]
        assert_same(together, alone | {"auxiliary": earlier}, index)


@needs_triton
@pytest.mark.parametrize("name", WITH_KERNELS)
@interpreted
@torch.no_grad()
def test_padding_changes_nothing_by_interpreted_kernels(name):
    options = {"implementation": "tiled_triton", "max_distance": 2} if "ripple" in name else {}
    model = shaken(create(name, stages=3, num_queries=9, **TINY, **options)).eval()
    # On a CPU only an explicit choice takes kernels, and linear attention has no such option.
    with patch.object(modules.LinearAttention, "implementation", "tiled_triton"):
        assert_padding_changes_nothing(model, images((50, 75), (90, 33)))  # 4×5 and 6×3 cells


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose convolutions are float32 indeed: TF32 has ten bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device("cuda")


def on(device, batch):
    return [image.to(device) for image in batch]


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_padding_changes_nothing_by_the_kernels_that_auto_takes(name, gpu):
    model = shaken(create(name)).eval().to(gpu)
    # 10×16, 20×7 and 13×25 cells
    batch = on(gpu, images((300, 500), (640, 200), (400, 800)))
    assert_padding_changes_nothing(model, batch)


@needs_gpu
@torch.no_grad()
def test_padding_changes_nothing_to_softmax_on_a_gpu(gpu):
    model = shaken(create("smca_resnet18")).eval().to(gpu)
    batch = on(gpu, images((300, 500), (640, 200), (400, 800)))
    together = model(batch)
    for index, image in enumerate(batch):
        assert_same(together, model([image]), index)


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_a_gpu_finds_what_the_cpu_does(name, gpu):
    model, batch = shaken(create(name, **TINY)).eval(), images((97, 160), (200, 65))
    expected = model(batch)
    found = model.to(gpu)(on(gpu, batch))
    for key in ("logits", "boxes"):
        torch.testing.assert_close(found[key].cpu(), expected[key], atol=1e-4, rtol=0)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_training_gives_finite_gradients(name, dtype, gpu):
    model = create(name, fixed_stages=0).to(gpu).train()
    calls = by_kernels(model)
    targets = [
        {
            "labels": torch.tensor([0, 3], device=gpu),
            "boxes": torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.7, 0.5, 0.3, 0.9]], device=gpu),
        },
        {
            "labels": torch.empty(0, dtype=torch.int64, device=gpu),
            "boxes": torch.empty(0, 4, device=gpu),
        },
    ]
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = model(on(gpu, images((320, 480), (500, 260))))
    DetectionLoss()(found, targets)["loss"].backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    assert all(layer.attn.qkv.weight.grad.any() for layer in model.encoder.layers)
    assert found["boxes"].dtype == torch.float32
    assert calls == [name in WITH_KERNELS] * 6


@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoders_are_timed_as_graphs(dtype):
    config = bench.DetectionBenchmark(
        grids=((5, 7),), image_size=(64, 96), backbone="resnet18", dtype=dtype, rounds=1
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a step is timed as it is")  # what cannot be a graph
        rows = list(bench.run(config))
    assert [row["timed_as"] for row in rows] == ["graph"] * 6 + ["calls"] * 3
    assert all(row["status"] == "ok" and row["peak_mb"] > 0 for row in rows)
