"""Matching and loss of detectors: against enumeration, torchvision, and two processes."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchvision")
pytest.importorskip("scipy")

from torchvision.ops import box_convert, generalized_box_iou, sigmoid_focal_loss

from processes import in_two_ranks
from ripple_lab.detection.loss import DetectionLoss
from ripple_lab.detection.matching import LossWeights, match, matching_cost

CLASSES = 5


def random_boxes(*shape, generator):
    """Centres and sizes of boxes that lie inside the image."""
    size = 0.05 + 0.4 * torch.rand(*shape, 2, generator=generator)
    centre = size / 2 + (1 - size) * torch.rand(*shape, 2, generator=generator)
    return torch.cat([centre, size], -1)


def random_targets(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "labels": torch.randint(0, CLASSES, (count,), generator=generator),
            "boxes": random_boxes(count, generator=generator),
        }
        for count in counts
    ]


def random_outputs(images, queries, layers=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    outputs = [
        {
            "logits": torch.randn(images, queries, CLASSES, generator=generator),
            "boxes": random_boxes(images, queries, generator=generator),
        }
        for _ in range(layers)
    ]
    return outputs[-1] | {"auxiliary": outputs[:-1]}


def stacked(outputs):
    layers = [*outputs["auxiliary"], outputs]
    return (torch.stack([layer[name] for layer in layers]) for name in ("logits", "boxes"))


def loop_cost(logits, boxes, target, weights):
    """The cost of each query for each object of one layer, number by number."""
    cost = torch.empty(len(logits), len(target["labels"]), dtype=torch.float64)
    for query, number in itertools.product(*map(range, cost.shape)):
        p = 1 / (1 + math.exp(-logits[query, target["labels"][number]].item()))
        there = -weights.alpha * (1 - p) ** weights.gamma * math.log(p)
        absent = -(1 - weights.alpha) * p**weights.gamma * math.log(1 - p)
        a, b = boxes[query].tolist(), target["boxes"][number].tolist()
        distance = sum(abs(x - y) for x, y in zip(a, b, strict=True))
        overlap = loop_giou(a, b)
        cost[query, number] = (
            weights.focal * (there - absent) + weights.l1 * distance - weights.giou * overlap
        )
    return cost


def loop_giou(a, b):
    """Generalised overlap of two boxes given by centre, width and height."""
    (a0, a1), (b0, b1) = (
        [[c - s / 2, c + s / 2] for c, s in zip(box[:2], box[2:], strict=True)] for box in (a, b)
    )
    common = max(0, min(a0[1], b0[1]) - max(a0[0], b0[0]))
    common *= max(0, min(a1[1], b1[1]) - max(a1[0], b1[0]))
    union = a[2] * a[3] + b[2] * b[3] - common
    hull = max(a0[1], b0[1]) - min(a0[0], b0[0])
    hull *= max(a1[1], b1[1]) - min(a1[0], b1[0])
    return common / union - (hull - union) / hull


def brute_force(cost):
    """The least total cost over all ways of giving each object a query of its own, or each query
    an object where there are more objects."""
    if cost.shape[0] < cost.shape[1]:
        cost = cost.T
    columns = torch.arange(cost.shape[1])
    ways = itertools.permutations(range(cost.shape[0]), cost.shape[1])
    return min(cost[list(rows), columns].sum().item() for rows in ways)


@pytest.mark.parametrize(
    "weights", [LossWeights(), LossWeights(focal=1, l1=0.5, giou=3, alpha=0.6, gamma=1.5)]
)
def test_cost_is_that_of_a_loop_over_queries_and_objects(weights):
    [target], outputs = random_targets([4]), random_outputs(1, 6, layers=2)
    logits, boxes = stacked(outputs)
    cost = matching_cost(logits[:, 0], boxes[:, 0], target, weights)
    assert cost.shape == (2, 6, 4)
    for layer in range(2):
        expected = loop_cost(logits[layer, 0], boxes[layer, 0], target, weights)
        torch.testing.assert_close(cost[layer].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [(3, 5), (0, 4), (5, 0, 2), (7, 1), (1, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_match_is_the_cheapest_of_all_permutations(counts, seed):
    queries, layers = 5, 2
    targets = random_targets(counts, seed)
    logits, boxes = stacked(random_outputs(len(counts), queries, layers, seed))
    pairs = match(logits, boxes, targets, LossWeights())
    assert pairs.shape == (4, layers * sum(min(queries, count) for count in counts))
    first = [0, *itertools.accumulate(counts)]
    for layer, image in itertools.product(range(layers), range(len(counts))):
        own = pairs[:, (pairs[0] == layer) & (pairs[1] == image)]
        query, number = own[2], own[3] - first[image]
        assert len(set(query.tolist())) == len(set(number.tolist())) == own.shape[1]
        assert own.shape[1] == min(queries, counts[image])
        if counts[image] == 0:
            continue
        cost = loop_cost(logits[layer, image], boxes[layer, image], targets[image], LossWeights())
        assert cost[query, number].sum().item() == pytest.approx(brute_force(cost), abs=1e-5)
    assert pairs[0].tolist() == sorted(pairs[0].tolist())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda logits, boxes, target: logits.fill_(math.nan), "logits have NaN.*diverged"),
        (lambda logits, boxes, target: boxes.fill_(math.inf), "boxes of the model have NaN"),
        (lambda logits, boxes, target: target["boxes"].fill_(math.nan), "see to the annotations"),
    ],
)
def test_costs_that_are_not_finite_are_named(spoil, message):
    targets = random_targets([2])
    logits, boxes = stacked(random_outputs(1, 3))
    spoil(logits, boxes, targets[0])
    with pytest.raises(ValueError, match=f"must be finite; .*{message}"):
        match(logits, boxes, targets, LossWeights())


def test_parts_are_torchvisions_focal_and_giou_of_the_matched_pairs():
    counts = (3, 0, 2)
    targets, outputs = random_targets(counts), random_outputs(3, 6)
    logits, boxes = outputs["logits"], outputs["boxes"]
    weights = LossWeights(focal=1.5, l1=4, giou=3, alpha=0.3, gamma=1)
    parts = DetectionLoss(weights)(outputs, targets)

    wanted = torch.zeros(3, 6, CLASSES)
    giou, l1 = 0.0, 0.0
    _, images, queries, numbers = match(*stacked(outputs), targets, weights)
    for image, query, number in zip(images, queries, numbers, strict=True):
        target = targets[image]
        number = number - sum(counts[:image])
        wanted[image, query, target["labels"][number]] = 1
        one, other = boxes[image, query], target["boxes"][number]
        corners = [box_convert(box[None], "cxcywh", "xyxy") for box in (one, other)]
        giou += 1 - generalized_box_iou(*corners).item()
        l1 += (one - other).abs().sum().item()
    focal = sigmoid_focal_loss(logits, wanted, alpha=0.3, gamma=1, reduction="sum").item()
    assert wanted.sum() == 5
    assert parts["focal"].item() == pytest.approx(focal / 5, rel=1e-5)
    assert parts["l1"].item() == pytest.approx(l1 / 5, rel=1e-5)
    assert parts["giou"].item() == pytest.approx(giou / 5, rel=1e-5)
    assert parts["loss"].item() == pytest.approx((1.5 * focal + 4 * l1 + 3 * giou) / 5, rel=1e-5)


def test_loss_is_the_sum_over_layers_each_matched_by_itself():
    targets, outputs = random_targets((2, 3)), random_outputs(2, 4, layers=3)
    loss = DetectionLoss()
    whole = loss(outputs, targets)
    layers = [
        loss(layer, targets) for layer in [*outputs["auxiliary"], outputs | {"auxiliary": []}]
    ]
    assert whole["loss"].item() == pytest.approx(sum(part["loss"].item() for part in layers))
    for name in ("focal", "l1", "giou"):
        torch.testing.assert_close(whole[name], layers[-1][name])
        assert not whole[name].requires_grad


def test_perfect_predictions_cost_nothing_even_of_tiny_objects():
    targets = random_targets((3, 2))
    targets[1]["boxes"][0] = torch.tensor([0.5, 0.5, 0.001, 0.001])
    outputs = {"logits": torch.full((2, 4, CLASSES), -20.0), "boxes": torch.full((2, 4, 4), 0.3)}
    for image, target in enumerate(targets):
        queries = torch.arange(len(target["labels"]))
        outputs["logits"][image, queries, target["labels"]] = 20.0
        outputs["boxes"][image, queries] = target["boxes"]
    parts = DetectionLoss()(outputs, targets)
    assert {name: value.item() for name, value in parts.items()} == pytest.approx(
        dict.fromkeys(parts, 0), abs=1e-3
    )
    outputs["boxes"][1, 0, 0] += 0.002  # the tiny object no longer overlaps
    assert DetectionLoss()(outputs, targets)["giou"] > 0.2


def test_images_without_objects_teach_that_nothing_is_there():
    targets, outputs = random_targets((0, 0)), random_outputs(2, 3, layers=2)
    for layer in [outputs, *outputs["auxiliary"]]:
        layer["logits"].requires_grad_()
        layer["boxes"].requires_grad_()
    parts = DetectionLoss()(outputs, targets)
    expected = sigmoid_focal_loss(outputs["logits"], torch.zeros(2, 3, CLASSES), reduction="sum")
    torch.testing.assert_close(parts["focal"], expected.detach())
    assert parts["l1"] == parts["giou"] == 0
    parts["loss"].backward()
    for layer in [outputs, *outputs["auxiliary"]]:
        assert (layer["logits"].grad > 0).all()
        # Data-parallel training waits for a gradient of every parameter.
        assert layer["boxes"].grad is not None and not layer["boxes"].grad.any()


def test_gradients_are_those_of_finite_differences():
    targets, outputs = random_targets((2, 1)), random_outputs(2, 3)
    boxes = outputs["boxes"].requires_grad_()
    loss = DetectionLoss()
    loss(outputs, targets)["loss"].backward()
    step = torch.randn(boxes.shape, generator=torch.Generator().manual_seed(2)) * 1e-3
    ahead, behind = (
        loss(outputs | {"boxes": boxes.detach() + sign * step}, targets)["loss"] for sign in (1, -1)
    )
    slope = (boxes.grad * step).sum().item()
    assert (ahead - behind).item() / 2 == pytest.approx(slope, rel=0.05)


def test_losses_are_float32_whatever_the_model_computes_in():
    targets, outputs = random_targets((2,)), random_outputs(1, 3)
    half = {name: outputs[name].bfloat16() for name in ("logits", "boxes")}
    same = {name: value.float() for name, value in half.items()}
    parts = DetectionLoss()(half, targets)
    assert parts["loss"].dtype == torch.float32
    torch.testing.assert_close(parts, DetectionLoss()(same, targets))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"labels": torch.tensor([CLASSES]), "boxes": torch.rand(1, 4)}, r"0 … 4.*from 5 to 5"),
        ({"labels": torch.tensor([-1]), "boxes": torch.rand(1, 4)}, "num_classes"),
        ({"labels": torch.tensor([1]), "boxes": torch.rand(2, 4)}, r"boxes \(2, 4\)"),
        ({"labels": torch.tensor([1.0]), "boxes": torch.rand(1, 4)}, "float32"),
    ],
)
def test_targets_that_do_not_fit_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        DetectionLoss()(random_outputs(1, 3), [target])


def test_as_many_targets_as_images_are_needed():
    with pytest.raises(ValueError, match="got 1 for 2 images"):
        DetectionLoss()(random_outputs(2, 3), random_targets((1,)))


# Objects of the four images of a batch: of both ranks, of one alone, of none, and one in all.
BATCHES = [(3, 0, 2, 4), (2, 1, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0)]


def gradients(counts, part=slice(None)):
    """Loss and gradient of a tiny linear model for a part of the batch."""
    head = torch.nn.Linear(6, CLASSES + 4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    features = torch.randn(4, 7, 6, generator=generator)
    said = head(features[part])
    layer = {"logits": said[..., :CLASSES], "boxes": said[..., CLASSES:].sigmoid()}
    loss = DetectionLoss()(layer | {"auxiliary": [layer]}, random_targets(counts)[part])["loss"]
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in head.parameters())])


def of_one_rank(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    own = slice(2 * rank, 2 * rank + 2)
    found = [gradients(counts, own).numpy() for counts in BATCHES]
    dist.destroy_process_group()
    return found


def test_mean_over_two_processes_is_what_one_process_computes():
    for counts, *both in zip(BATCHES, *in_two_ranks(of_one_rank), strict=True):
        alone, both = gradients(counts), [torch.from_numpy(gradient) for gradient in both]
        assert alone.abs().sum() > 0
        assert not torch.allclose(*both)
        torch.testing.assert_close(torch.stack(both).mean(0), alone, atol=1e-5, rtol=1e-5)
