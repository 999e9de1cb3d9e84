"""Scikit-learn's handwritten digits, which need no download."""

import torch
import torch.nn.functional as F

from ripple_lab.data.images import Images


def load_digits_images(train: bool) -> Images:
    """Digits, enlarged from 8×8 to 32×32 pixels, grey in three channels.

    Args:
        train: The 1,437 training images; else the other 360.

    Returns:
        The images; both splits have the classes in the same proportions.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    splits = train_test_split(
        range(len(digits.target)), test_size=360, random_state=0, stratify=digits.target
    )
    index = splits[0 if train else 1]
    small = torch.from_numpy(digits.images[index]).float().unsqueeze(1) * (255 / 16)
    grey = F.interpolate(small, size=(32, 32), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(digits.target[index]).long()
    return Images(grey.expand(-1, 3, -1, -1).contiguous(), labels, tuple("0123456789"))
