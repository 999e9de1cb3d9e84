"""The pictures of a detection recipe."""

from typing import Any

from ripple_lab.data.module import RecipeData
from ripple_lab.detection.coco import open_coco
from ripple_lab.detection.items import DetectionItems, DetectionPictures, collate
from ripple_lab.detection.shapes import Shapes
from ripple_lab.detection.transforms import evaluation_transform, train_transform


class DetectionData(RecipeData):
    """Pictures with boxes, augmented as DETR does."""

    collate = staticmethod(collate)

    def open_split(self, train: bool) -> DetectionItems:
        recipe = self.recipe
        if train:
            transform = train_transform(recipe.augmentation)
        else:
            transform = evaluation_transform(
                recipe.data.evaluation_scale, recipe.augmentation.max_size
            )
        return DetectionItems(open_pictures(recipe, train), transform, train)

    def ground_truth(self) -> dict[str, Any]:
        """COCO's form of the objects that are to be found in evaluation."""
        return self.open(train=False).dataset.ground_truth()


def open_pictures(recipe: Any, train: bool) -> DetectionPictures:
    """The pictures of one split of a recipe's data set."""
    spec = recipe.data
    pictures: DetectionPictures
    if spec.name == "shapes":
        count = spec.count if train else spec.evaluation_count
        pictures = Shapes(count, seed=int(train))
    else:
        pictures = open_coco(spec.root, train)
    if len(pictures.classes) != spec.num_classes:
        raise ValueError(
            f"the recipe says data.num_classes={spec.num_classes}; {spec.name} has "
            f"{len(pictures.classes)} classes: {', '.join(pictures.classes[:5])} …"
        )
    return pictures
