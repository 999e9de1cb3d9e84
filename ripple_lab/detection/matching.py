"""Which query is matched with which object: the cheapest assignment."""

from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou, sigmoid_focal_loss

from ripple_lab.detection.spec import LossWeights

# What a model says: "logits" (B, Q, C), "boxes" (B, Q, 4), "auxiliary", a list of the same.
Outputs = dict[str, Any]
# The objects of an image: "labels" (n,), "boxes" (n, 4); for evaluation "image_id" and "size".
Target = dict[str, Any]


def matching_cost(logits: Tensor, boxes: Tensor, target: Target, weights: LossWeights) -> Tensor:
    """The cost of matching each query with each object of one image.

    The cost of a class is how much the focal loss rises when the query is given that class.

    Args:
        logits: (L, Q, C), of L layers.
        boxes: (L, Q, 4), centre, width and height relative to the image.
        target: "labels" (n,) and "boxes" (n, 4), of the same kind.
        weights: Of the parts.

    Returns:
        float32 (L, Q, n).
    """
    layers, queries, _ = logits.shape
    chosen = logits.float()[..., target["labels"]]  # (L, Q, n)
    boxes, objects = boxes.float().flatten(0, 1), target["boxes"].float()  # (L·Q, 4), (n, 4)
    there, absent = (
        sigmoid_focal_loss(chosen, torch.full_like(chosen, value), weights.alpha, weights.gamma)
        for value in (1.0, 0.0)
    )
    distance = torch.cdist(boxes, objects, p=1)  # (L·Q, n)
    overlap = generalized_box_iou(corners(boxes), corners(objects))  # (L·Q, n)
    of_boxes = weights.l1 * distance - weights.giou * overlap
    return weights.focal * (there - absent) + of_boxes.view(layers, queries, -1)


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: list[Target], weights: LossWeights) -> Tensor:
    """Gives each object of each image a query of its own, in every layer.

    Args:
        logits: (L, B, Q, C).
        boxes: (L, B, Q, 4).
        targets: B of them; an image may have no objects. If there are more objects than
            queries, the most expensive are left out.
        weights: Of the cost.

    Returns:
        int64 (4, L·m), on the CPU: layer, image, query and object of each of the m pairs of each
        layer, the first layer first. Objects are numbered over all images of the batch.

    Raises:
        ValueError: A cost is not a finite number.
    """
    from scipy.optimize import linear_sum_assignment  # slow, and predictions do without

    costs = [
        matching_cost(logits[:, image], boxes[:, image], target, weights)
        for image, target in enumerate(targets)
    ]
    # One transfer for all, because each one waits for the GPU.
    together = torch.cat([cost.flatten() for cost in costs]).cpu()
    if not together.isfinite().all():
        raise ValueError(
            "the cost of a match must be finite; "
            f"{int((~together.isfinite()).sum())} of {together.numel()} are not: "
            + _culprits(logits, boxes, targets)
        )
    parts = together.split([cost.numel() for cost in costs])
    on_cpu = [part.view(cost.shape).numpy() for part, cost in zip(parts, costs, strict=True)]
    pairs = [torch.empty(4, 0, dtype=torch.int64)]
    for layer in range(logits.shape[0]):
        first = 0  # object of the image
        for image, cost in enumerate(on_cpu):  # (L, Q, n)
            queries, objects = map(torch.from_numpy, linear_sum_assignment(cost[layer]))
            where = [torch.full_like(queries, layer), torch.full_like(queries, image)]
            pairs.append(torch.stack([*where, queries, first + objects]))
            first += cost.shape[2]
    return torch.cat(pairs, dim=1)


def corners(boxes: Tensor) -> Tensor:
    """Centre, width and height → left, top, right and bottom; (…, 4) both."""
    return box_convert(boxes, "cxcywh", "xyxy")


def _culprits(logits: Tensor, boxes: Tensor, targets: list[Target]) -> str:
    found = {
        "logits": logits,
        "boxes of the model": boxes,
        "boxes of the targets": torch.cat([target["boxes"] for target in targets]),
    }
    bad = [name for name, values in found.items() if not values.isfinite().all()]
    if not bad:
        return "a box of the targets, or of the model, is too large"
    if "boxes of the targets" in bad:
        return f"{', '.join(bad)} have NaN or infinity in them; see to the annotations"
    return (
        f"{', '.join(bad)} have NaN or infinity in them, so training has diverged; "
        "a lower learning rate or clip may do better"
    )
