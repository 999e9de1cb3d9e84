"""What a detector found, and how good it is: average precision by COCO's rules."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ripple_lab.detection.items import DAMAGED
from ripple_lab.detection.matching import Outputs, Target, corners

# Our names, and the evaluator's.
METRICS = {
    "ap": "AP_all",
    "ap50": "AP_50",
    "ap75": "AP_75",
    "ap_small": "AP_small",
    "ap_medium": "AP_medium",
    "ap_large": "AP_large",
}
# Pairs of query and class that are judged in an image, as in SMCA; COCO's rules then take 100 of
# each class.
TOP = 300


@torch.no_grad()
def find_objects(
    outputs: Outputs, sizes: list[tuple[int, int]], top: int = TOP
) -> list[dict[str, Tensor]]:
    """The most likely objects of each image, the most likely first.

    Args:
        outputs: "logits" (B, Q, C) and "boxes" (B, Q, 4), centre, width and height relative to
            each image.
        sizes: Height and width in pixels in which boxes are wanted, for each image.
        top: How many pairs of query and class, at most; one query may count as two objects.

    Returns:
        For each image "scores" (k,), "labels" (k,) and "boxes" (k, 4), left, top, right and bottom
        in pixels.
    """
    logits, boxes = outputs["logits"].float(), outputs["boxes"].float()
    if len(sizes) != len(logits):
        raise ValueError(f"one size for each image; got {len(sizes)} for {len(logits)} images")
    classes = logits.shape[-1]
    scores, places = logits.sigmoid().flatten(1).topk(min(top, logits[0].numel()))  # (B, k) both
    chosen = corners(boxes).gather(1, (places // classes)[..., None].expand(-1, -1, 4))
    lengths = torch.tensor([(w, h, w, h) for h, w in sizes], device=boxes.device)  # (B, 4)
    pixels = chosen * lengths[:, None]
    return [
        {"scores": s, "labels": label, "boxes": b}
        for s, label, b in zip(scores, places % classes, pixels, strict=True)
    ]


class CocoEvaluation:
    """Collects the objects found in the images of an evaluation, on every rank, and judges them.

    Args:
        ground_truth: COCO's form of the objects: images, annotations and categories. Labels are
            the places of the categories in the order of their ids.
    """

    def __init__(self, ground_truth: dict[str, Any]):
        self.ground_truth = ground_truth
        self._category_ids = np.array(sorted(c["id"] for c in ground_truth["categories"]))
        self._found: dict[int, np.ndarray] = {}

    def update(self, found: list[dict[str, Tensor]], targets: list[Target]) -> None:
        """Adds the objects that `find_objects` found in the images of these targets."""
        for objects, target in zip(found, targets, strict=True):
            if target["image_id"] == DAMAGED:
                continue
            scores, labels, boxes = (
                objects[name].double().cpu().numpy() for name in ("scores", "labels", "boxes")
            )
            rows = np.empty((len(scores), 7))
            rows[:, 0] = target["image_id"]
            rows[:, 1:3], rows[:, 3:5] = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
            rows[:, 5], rows[:, 6] = scores, self._category_ids[labels.astype(int)]
            self._found[target["image_id"]] = rows

    def compute(self) -> dict[str, float]:
        """Average precision over the images added on any rank.

        Returns:
            "ap", "ap50", "ap75", "ap_small", "ap_medium" and "ap_large", between 0 and 1; NaN where
            no image has an object of that size.
        """
        found = gather(self._found)
        if not found:
            raise ValueError("no image was evaluated: call update before compute")
        return judge(self.ground_truth, found)


def gather(found: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The objects found by all ranks, each image once."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return found
    parts: list[dict[int, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, found)
    return {image: rows for part in parts for image, rows in part.items()}


def judge(ground_truth: dict[str, Any], found: dict[int, np.ndarray]) -> dict[str, float]:
    """Average precision on the images that `found` names; rows as faster-coco-eval takes them."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "average precision is computed by faster-coco-eval, which is not installed. In the "
            "checkout: pip install '.[detection]'",
            name=error.name,
        ) from None
    truth = COCO(ground_truth, use_deepcopy=True)  # it writes into what it is given
    results = truth.loadRes(np.concatenate(list(found.values())))
    evaluation = COCOeval_faster(truth, results, iouType="bbox")
    evaluation.params.imgIds = sorted(found)
    evaluation.run()
    values = evaluation.stats_as_dict
    return {
        name: math.nan if values[key] == -1 else float(values[key]) for name, key in METRICS.items()
    }
