"""Detectors: an image's result is its own, whatever it is batched with."""

import math
import time
from urllib.error import URLError

import pytest
import torch

torchvision = pytest.importorskip("torchvision")
pytest.importorskip("timm")

from ripple_attention.models import count_parameters  # noqa: E402
from ripple_lab import paper  # noqa: E402
from ripple_lab.bench import detection as bench  # noqa: E402
from ripple_lab.detection import backbone  # noqa: E402
from ripple_lab.detection.backbone import Backbone  # noqa: E402
from ripple_lab.detection.decoder import Decoder  # noqa: E402
from ripple_lab.detection.encoder import ATTENTIONS, Encoder  # noqa: E402
from ripple_lab.detection.model import create_detector  # noqa: E402
from ripple_lab.detection.positions import padding_mask, sine_positions  # noqa: E402
from ripple_lab.recipes import find_recipe  # noqa: E402
from ripple_lab.reproduce import networks  # noqa: E402

SMALL = ["smca_resnet18", "smca_la_resnet18", "smca_ripple_resnet18"]
TINY = {"dim": 32, "num_heads": 4, "feedforward_dim": 48, "encoder_layers": 2, "decoder_layers": 2}


def create(name, **options):
    torch.manual_seed(0)
    return create_detector(name, num_classes=5, pretrained_backbone=False, **options)


def shaken(model):
    """The model with every parameter moved: nothing is zero, as after training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def images(*sizes):
    return [torch.randn(3, *size) for size in sizes]


def assert_same(found, expected, image):
    layers = zip([found, *found["auxiliary"]], [expected, *expected["auxiliary"]], strict=True)
    for here, there in layers:
        for key in ("logits", "boxes"):
            torch.testing.assert_close(here[key][image], there[key][0], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_an_image_has_the_same_result_alone_and_in_a_padded_batch(name):
    model = shaken(create(name, max_distance=3) if "ripple" in name else create(name)).eval()
    batch = images((97, 160), (200, 65))  # 4×5 and 7×3 cells: padded both ways
    together = model(batch)
    for index, image in enumerate(batch):
        alone = model([image])
        assert_same(together, alone, index)
        assert alone["logits"].std(1).min() > 1e-3, "queries say all the same: this proves nothing"
    different = model([batch[0], torch.randn(3, 33, 300)])
    assert_same(different, model(batch[:1]), 0)


@torch.no_grad()
def test_images_keep_their_order_whatever_sizes_they_have():
    model = shaken(create("smca_ripple_resnet18", **TINY)).eval()
    batch = images((64, 64), (90, 40), (64, 64), (40, 90))
    together = model(batch)
    for index, image in enumerate(batch):
        assert_same(together, model([image]), index)


@torch.no_grad()
@pytest.mark.parametrize("stages", [2, 3])
def test_fewer_stages_have_smaller_cells(stages):
    cut = shaken(create("smca_ripple_resnet18", stages=stages, **TINY)).eval()
    stride = 2 ** (1 + stages)
    batch = images((5 * stride, 3 * stride), (2 * stride + 1, 4 * stride))
    features = cut.backbone(batch)
    assert features.shape == (2, 512 * stride // 32, 5, 4)
    assert not features[1, :, 3:].any() and features[1, :, 2].any()
    together = cut(batch)
    for index, image in enumerate(batch):
        assert_same(together, cut([image]), index)
    with pytest.raises(ValueError, match="a backbone has 1 to 4 stages; got stages=5"):
        create("smca_resnet18", stages=5)


@torch.no_grad()
def test_a_tensor_of_images_equals_a_list_of_them():
    model = shaken(create("smca_la_resnet18", **TINY)).eval()
    batch = torch.randn(2, 3, 70, 50)
    for key in ("logits", "boxes"):
        torch.testing.assert_close(model(batch)[key], model(list(batch))[key])


@torch.no_grad()
def test_what_comes_out():
    found = create("smca_resnet18", num_queries=7, **TINY)(images((64, 96), (32, 32)))
    assert found["logits"].shape == (2, 7, 5) and found["boxes"].shape == (2, 7, 4)
    assert [x["boxes"].shape for x in found["auxiliary"]] == [(2, 7, 4)]
    assert found["boxes"].min() > 0 and found["boxes"].max() < 1
    assert found["logits"].sigmoid().mean() == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize("name", paper.DETECTORS)
def test_trained_parameters_are_the_papers(name):
    """Within 0.1 M, were there a φ and a P for each head: ours are shared by the heads."""
    counted = networks.count(find_recipe(f"coco-{name.split('_resnet')[0].replace('_', '-')}-50"))
    with torch.device("meta"):
        model = create_detector(name, num_classes=80, pretrained_backbone=False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted["millions"] == trained / 1e6 < count_parameters(model) / 1e6
    for_each_head = counted["millions"] + 7 * counted["phi_and_p"]
    assert for_each_head == pytest.approx(paper.DETECTORS[name]["parameters"], abs=0.1)


def test_multiply_adds_are_near_the_papers():
    costs = {name: bench.detector_cost(name) for name in paper.DETECTORS}
    for name, wanted in paper.DETECTORS.items():
        assert costs[name].gflops == pytest.approx(wanted["gflops"], abs=5)
    softmax, linear, ripple = (cost.gflops for cost in costs.values())
    assert linear < ripple < softmax


@pytest.mark.parametrize("name", SMALL)
def test_every_trained_parameter_has_a_gradient(name):
    model = shaken(create(name, **TINY)).train()
    found = model(images((64, 96), (96, 40)))
    layers = [found, *found["auxiliary"]]
    weighted = [torch.randn_like(x[key]) * x[key] for x in layers for key in ("logits", "boxes")]
    sum(x.sum() for x in weighted).backward()
    # At first queries know nothing, so that it does not matter yet how they look at each other.
    idle = {"self_attn.in_proj_weight"}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            first = parameter_name.removeprefix("decoder.layers.0.")
            assert parameter.grad.any() or first in idle, parameter_name
        else:
            assert parameter.grad is None


def test_stem_and_first_stage_are_fixed():
    body = Backbone("resnet18", pretrained=False).body
    fixed = {name.split(".")[0] for name, p in body.named_parameters() if not p.requires_grad}
    trained = {name.split(".")[0] for name, p in body.named_parameters() if p.requires_grad}
    assert fixed == {"conv1", "layer1"}
    assert trained == {"layer2", "layer3", "layer4"}
    free = Backbone("resnet18", pretrained=False, fixed_stages=0)
    assert all(p.requires_grad for p in free.parameters())
    with pytest.raises(ValueError, match="fixed_stages must be 0"):
        Backbone("resnet18", pretrained=False, fixed_stages=6)


@torch.no_grad()
def test_random_features_are_of_modest_size():
    torch.manual_seed(0)
    features = Backbone("resnet50", pretrained=False)(images((96, 64)))
    assert features.shape == (1, 2048, 3, 2)
    assert 0.1 < features.std() < 10


@torch.no_grad()
def test_pretrained_features_are_torchvisions(monkeypatch):
    torch.manual_seed(0)
    network = torchvision.models.resnet18()
    network.train()(torch.randn(4, 3, 64, 64))  # moves the statistics
    monkeypatch.setattr(backbone, "pretrained_weights", lambda name: network.state_dict())
    model = Backbone("resnet18")
    network.avgpool = network.fc = torch.nn.Identity()
    image = torch.randn(3, 64, 96)
    expected = network.eval()(image[None]).view(1, 512, 2, 3)
    torch.testing.assert_close(model.train()([image]), expected)


def test_weights_that_cannot_be_had_are_one_clear_line(monkeypatch):
    def offline(*args, **kwargs):
        raise URLError("no network here")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(RuntimeError, match="no network here") as caught:
        create_detector("smca_resnet18")
    message = str(caught.value)
    assert "resnet18-f37072fd.pth" in message and "pretrained_backbone=False" in message
    assert "--model.no-pretrained-backbone --model.fixed-stages 0" in message
    assert "\n" not in message


def test_unknown_names_say_the_nearest():
    with pytest.raises(ValueError, match="did you mean smca_ripple_resnet50"):
        create_detector("smca_ripple_resnet_50", pretrained_backbone=False)
    with pytest.raises(
        ValueError, match="LinearAttention has the options .*; got max_distance: leave"
    ):
        create("smca_la_resnet18", max_distance=4)
    with pytest.raises(ValueError, match="attention must be one of softmax, linear, ripple"):
        Encoder("sliding")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one image at least"),
        ([torch.zeros(1, 3, 8, 8)], r"got \(1, 3, 8, 8\), torch.float32 at place 0"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)], "uint8 at place 1"),
    ],
)
def test_what_is_not_an_image_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        create("smca_resnet18", **TINY)(given)


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_positions_are_for_queries_and_keys_alone(attention):
    torch.manual_seed(0)
    encoder = Encoder(attention, num_layers=1, dim=32, num_heads=2, feedforward_dim=32).eval()
    x, positions = torch.randn(1, 3, 4, 32), torch.randn(1, 3, 4, 32)
    layer = encoder.layers[0]
    tokens = layer.attn(x + positions, x)
    after = layer.norm1(x + tokens)
    torch.testing.assert_close(encoder(x, positions), layer.norm2(after + layer.mlp(after)))
    assert not torch.allclose(tokens, layer.attn(x + positions), atol=1e-3)


def test_positions_are_detrs_and_ignore_padding():
    cells = torch.tensor([[3, 5], [4, 2]])
    found = sine_positions(cells, (4, 5), 16)
    inside = ~padding_mask(cells, (4, 5))
    assert inside.sum((1, 2)).tolist() == [15, 8]
    # As DETR states it: running counts of what is not padded, by the last of them.
    for axis, channels in ((1, slice(0, 8)), (2, slice(8, 16))):
        counts = inside.cumsum(axis, dtype=torch.float32)
        share = 2 * math.pi * counts / counts.amax(axis, keepdim=True).clamp(min=1)
        for channel in range(8):
            wave = math.sin if channel % 2 == 0 else math.cos
            angles = (share / 10_000 ** (2 * (channel // 2) / 8))[inside]
            expected = torch.tensor([wave(angle) for angle in angles.tolist()])
            torch.testing.assert_close(found[..., channels][..., channel][inside], expected)
    alone = sine_positions(cells[1:], (4, 2), 16)
    torch.testing.assert_close(found[1:, :, :2], alone)


def linear(weights, prefix, x):
    return x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]


def attend(weights, prefix, queries, keys, values, extra):
    """Multi-head attention of 4 heads with something added to its logits (B, N, Q, L)."""
    projections = zip(
        weights[f"{prefix}.in_proj_weight"].chunk(3),
        weights[f"{prefix}.in_proj_bias"].chunk(3),
        (queries, keys, values),
        strict=True,
    )
    q, k, v = ((x @ w.T + b).unflatten(-1, (4, -1)) for w, b, x in projections)
    logits = torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5 + extra
    seen = torch.einsum("bnqk,bknd->bqnd", logits.softmax(-1), v).flatten(2)
    return linear(weights, f"{prefix}.out_proj", seen)


def mlp(weights, prefix, places, x):
    for number, place in enumerate(places):
        x = linear(weights, f"{prefix}.{place}", x.relu() if number else x)
    return x


def norm(weights, prefix, x):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return x * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]


def smca(weights, layers, memory, positions, sizes, mask):
    """The decoder of SMCA's authors (type 3), formula by formula: logits and boxes of each layer.

    `sizes` (B, 2) are width and height of the images in cells.
    """
    (B, H, W, _), queries = memory.shape, weights["queries.weight"]
    tokens, marked = memory.flatten(1, 2), (memory + positions).flatten(1, 2)
    cells = torch.tensor([(x, y) for y in range(H) for x in range(W)]).double()  # column, row
    hidden = torch.zeros(H * W).double().masked_fill(mask.flatten(1), -torch.inf)[:, None, None]
    query_pos = queries.expand(B, -1, -1)
    tgt, logits, boxes = torch.zeros_like(query_pos), [], []
    for number in range(layers):
        at = f"layers.{number}"
        out = norm(weights, f"{at}.norm_point", tgt + query_pos)
        if number == 0:
            before_sigmoid = mlp(weights, "reference", (0, 3, 6), out)
            reference = before_sigmoid.sigmoid() * sizes[:, None]
        offset, scale = (linear(weights, f"{at}.{name}", out) for name in ("offset", "scale"))
        point = (reference.repeat(1, 1, 4) + offset).unflatten(-1, (4, 2))  # (B, Q, N, 2)
        distance = (point[:, :, :, None] - cells).square()  # (B, Q, N, L, 2)
        scale = scale.square().unflatten(-1, (4, 1, 2))
        gaussian = -(distance * scale).sum(-1).transpose(1, 2) / 8
        asking = tgt + query_pos
        tgt = tgt + attend(weights, f"{at}.self_attn", asking, asking, tgt, 0)
        tgt = norm(weights, f"{at}.norm1", tgt)
        asking = tgt + query_pos
        tgt = tgt + attend(weights, f"{at}.cross_attn", asking, marked, tokens, gaussian + hidden)
        tgt = norm(weights, f"{at}.norm2", tgt)
        tgt = norm(weights, f"{at}.norm3", tgt + mlp(weights, f"{at}.mlp", (0, 3), tgt))
        last = norm(weights, "norm", tgt)
        logits.append(linear(weights, "classes", last))
        box = mlp(weights, "boxes", (0, 3, 6), last)
        box = torch.cat([box[..., :2] + before_sigmoid, box[..., 2:]], -1)
        boxes.append(box.sigmoid())
    return torch.stack(logits), torch.stack(boxes)


@torch.no_grad()
def test_the_decoder_is_that_of_smcas_authors():
    torch.manual_seed(0)
    options = {"num_queries": 6, "dim": 16, "num_heads": 4, "feedforward_dim": 24}
    decoder = Decoder(3, num_layers=3, **options).double().eval()
    for parameter in decoder.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    memory, positions = torch.randn(2, 2, 4, 5, 16, dtype=torch.float64)
    cells, sizes = torch.tensor([[4, 5], [3, 2]]), torch.tensor([[4.7, 3.9], [1.6, 2.2]]).double()
    mask = padding_mask(cells, (4, 5))
    found = decoder(memory, positions, sizes, mask)
    expected = smca(dict(decoder.named_parameters()), 3, memory, positions, sizes, mask)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)
    assert found[1].std(2).min() > 1e-3, "queries say all the same: this proves nothing"


def test_the_decoder_starts_as_smcas_does():
    decoder = Decoder(3, num_layers=2, dim=64, feedforward_dim=96)
    for layer in decoder.layers:
        assert not layer.scale.weight.any() and (layer.scale.bias == 1).all()
        assert_xavier(layer.offset, *layer.mlp, layer.self_attn.out_proj, layer.cross_attn.out_proj)
    assert_xavier(*decoder.reference)
    assert decoder.classes.bias.tolist() == pytest.approx([-math.log(99)] * 3)
    boxes = [layer for layer in decoder.boxes if isinstance(layer, torch.nn.Linear)]
    for layer in (decoder.classes, *boxes):  # as PyTorch's linear layers start
        assert 0.9 / 8 < layer.weight.abs().max() <= 1 / 8


def assert_xavier(*modules):
    for layer in modules:
        if isinstance(layer, torch.nn.Linear):
            bound = (6 / (layer.in_features + layer.out_features)) ** 0.5
            assert 0.9 * bound < layer.weight.abs().max() <= bound


@torch.no_grad()
def test_boxes_and_references_are_parts_of_each_image():
    model = create("smca_resnet18", num_queries=20, **TINY).eval()
    for module in model.decoder.boxes:
        for parameter in module.parameters():
            parameter.zero_()  # boxes are then centred on their references
    seen = []
    layer = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    found = model(images((64, 160), (200, 40)))
    boxes = found["boxes"]
    torch.testing.assert_close(boxes[0], boxes[1])
    for image, (height, width) in enumerate([(64, 160), (200, 40)]):
        in_cells = boxes[image, :, :2] * torch.tensor([width / 32, height / 32])
        torch.testing.assert_close(seen[0][image], in_cells)


def test_dropout_is_also_of_the_probabilities_of_softmax_attention():
    layers = Encoder("softmax", num_layers=2, dim=16, num_heads=2, dropout=0.3).layers
    assert [layer.attn.attn_drop for layer in layers] == [0.3, 0.3]


def test_bench_times_encoders_and_detectors():
    config = bench.DetectionBenchmark(
        grids=((3, 4), (2, 2)),
        image_size=(32, 64),
        backbone="resnet18",
        padded=True,
        dtype="float32",
        device="cpu",
        rounds=1,
    )
    rows = list(bench.run(config))
    encoders = [row for row in rows if row["part"] == "encoder"]
    assert len(encoders) == 2 * 2 * 3
    assert {row["system"] for row in encoders} == set(ATTENTIONS)
    detectors = [row for row in rows if row["part"] == "detector"]
    assert [row["system"] for row in detectors] == SMALL
    assert detectors[0]["tokens"] == 2
    assert all(row["status"] == "ok" and row["median_ms"] > 0 for row in rows)
    assert bench.default_path(config).name.startswith("detection-")


def test_bench_says_what_does_not_fit(monkeypatch):
    def step(attention, *_):
        def too_large():
            raise torch.OutOfMemoryError("CUDA out of memory")

        return too_large if attention == "softmax" else lambda: time.sleep(0.1)

    monkeypatch.setattr(bench, "encoder_step", step)
    config = bench.DetectionBenchmark(grids=((2, 2),), image_size=None, device="cpu", rounds=1)
    rows = list(bench.run(config))
    status = {row["system"]: row["status"] for row in rows}
    assert status == {"softmax": "does not fit", "linear": "ok", "ripple": "ok"}
