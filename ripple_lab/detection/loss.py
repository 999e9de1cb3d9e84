"""The loss of a detector: each query is compared with its matched object, or with none."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from ripple_lab.detection.matching import Outputs, Target, corners, match
from ripple_lab.detection.spec import LossWeights

# Areas are relative to the image: torchvision's 1e-7 would be a tenth of a box of 1/1000 a side.
GIOU_EPS = 1e-12


class DetectionLoss(nn.Module):
    """Focal, L1 and GIoU loss of the last and of all auxiliary layers, by the number of objects.

    Each layer is matched by itself. All sums are divided by the number of objects of the step over
    all ranks. Data-parallel training averages gradients over ranks, so they equal those of one
    process with the whole batch.

    Args:
        weights: Of the parts, in the match and in the loss.
    """

    def __init__(self, weights: LossWeights | None = None):
        super().__init__()
        self.weights = weights or LossWeights()

    def forward(self, outputs: Outputs, targets: list[Target]) -> dict[str, Tensor]:
        """
        Args:
            outputs: "logits" (B, Q, C), "boxes" (B, Q, 4), centre, width and height relative to
                each image; "auxiliary": a list of the same for earlier layers, if there are any.
            targets: For each image, "labels" int64 (n,) in 0 … C − 1, "boxes" (n, 4).

        Returns:
            "loss", to minimise: the weighted parts of all layers. "focal", "l1" and "giou", to
            watch: those of the last layer, not weighted and without gradients.
        """
        layers = [*outputs.get("auxiliary", []), outputs]
        logits = torch.stack([layer["logits"] for layer in layers]).float()  # (L, B, Q, C)
        boxes = torch.stack([layer["boxes"] for layer in layers]).float()  # (L, B, Q, 4)
        check_targets(targets, images=logits.shape[1], classes=logits.shape[3])
        pairs = match(logits, boxes, targets, self.weights).to(logits.device)
        layer, image, query, number = pairs  # (L·m,) each

        labels = torch.cat([target["labels"] for target in targets])
        objects = torch.cat([target["boxes"] for target in targets]).float()
        wanted = torch.zeros_like(logits)
        wanted[layer, image, query, labels[number]] = 1
        found, truth = boxes[layer, image, query], objects[number]  # (L·m, 4) both
        distance = F.l1_loss(found, truth, reduction="none").sum(1)  # (L·m,)
        overlap = generalized_box_iou_loss(corners(found), corners(truth), eps=GIOU_EPS)  # (L·m,)

        count = count_objects(targets, logits.device)
        by_layer = (len(layers), len(number) // len(layers))
        parts = {
            "focal": self._focal(logits, wanted).sum((1, 2, 3)) / count,  # (L,)
            "l1": distance.view(by_layer).sum(1) / count,
            "giou": overlap.view(by_layer).sum(1) / count,
        }
        weighted = [getattr(self.weights, name) * values.sum() for name, values in parts.items()]
        last = {name: values[-1].detach() for name, values in parts.items()}
        return {"loss": torch.stack(weighted).sum(), **last}

    def _focal(self, logits: Tensor, wanted: Tensor) -> Tensor:
        return sigmoid_focal_loss(logits, wanted, self.weights.alpha, self.weights.gamma)


def count_objects(targets: list[Target], device: torch.device) -> Tensor:
    """Objects of the step, at least 1, divided by the number of ranks: a scalar tensor.

    A rank's loss is its sum divided by this; the mean over ranks is then the sum over all of them
    divided by all objects.
    """
    objects = sum(len(target["labels"]) for target in targets)
    count = torch.tensor(float(objects), device=device)
    if not (dist.is_available() and dist.is_initialized()):
        return count.clamp(min=1)
    dist.all_reduce(count)
    return count.clamp(min=1) / dist.get_world_size()


def check_targets(targets: list[Target], images: int, classes: int) -> None:
    """Refuses targets that do not fit the outputs."""
    if len(targets) != images:
        raise ValueError(f"one target for each image; got {len(targets)} for {images} images")
    for target in targets:
        labels, boxes = target["labels"], target["boxes"]
        if labels.dtype != torch.int64 or boxes.shape != (*labels.shape, 4) or labels.dim() != 1:
            raise ValueError(
                "a target has labels (n,) of int64 and boxes (n, 4); got labels "
                f"{tuple(labels.shape)} of {labels.dtype}, boxes {tuple(boxes.shape)}"
            )
    labels = torch.cat([target["labels"] for target in targets])
    if len(labels) == 0:
        return
    least, most = torch.stack(labels.aminmax()).tolist()
    if least < 0 or most >= classes:
        raise ValueError(
            f"labels lie in 0 … {classes - 1}, as the model has {classes} classes; got labels "
            f"from {least} to {most}: give the model the num_classes of the data"
        )
