import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import chi2_contingency, chisquare, ks_2samp, kstest
from timm.data.auto_augment import (
    _RAND_INCREASING_TRANSFORMS,
    _RAND_TRANSFORMS,
    LEVEL_TO_ARG,
    NAME_TO_OP,
)
from torch import Tensor

from ripple_lab.data.augment import Augmentation, eval_transform, stages, train_transform
from ripple_lab.data.batch_augment import (
    LEVELS,
    BatchAugmentation,
    batch_policy,
    normalize,
    operate,
)

STATISTICS = {"mean": (0.507, 0.487, 0.441), "std": (0.267, 0.256, 0.276)}
FILL = (129, 124, 112)  # the mean colour, 0 to 255
NAMES = sorted({*_RAND_INCREASING_TRANSFORMS, *_RAND_TRANSFORMS})
NOTHING = Augmentation(crop="none", flip=0.0, auto_augment=None, color_jitter=0.0, erasing=0.0)
IMAGES = 2000


def to_picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def synthetic_images(size: int, seed: int = 0) -> Tensor:
    """Noise, noisy ramps, ramps, low contrast, one colour, few levels, black and white."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (6, 3, size, size), generator=generator)
    ramp = torch.linspace(0, 255, size).expand(3, size, size)
    ramps = torch.stack([ramp, ramp.mT, 255 - ramp, (ramp + ramp.mT) / 2, ramp / 3, ramp.mT / 2])
    flat = torch.tensor([0, 255, 77, 128, 200, 1])[:, None, None, None].expand_as(noise)
    kinds = [noise, 0.7 * ramps + 0.3 * noise, ramps, 100 + noise % 20, flat, noise // 64 * 80]
    return torch.cat([*kinds, noise // 128 * 255]).to(torch.uint8)


def still_life(size: int = 32) -> Tensor:
    """A picture without symmetry, of every brightness."""
    x, y = torch.meshgrid(*[torch.linspace(0, 1, size)] * 2, indexing="xy")
    disc = ((x - 0.3) ** 2 + (y - 0.35) ** 2 < 0.04).float()
    red, green, blue = 0.2 + 0.6 * x, 0.15 + 0.5 * y * x, 0.7 - 0.5 * y
    colors = torch.stack([red + 0.2 * disc, green + 0.5 * disc, blue - 0.15 * disc])
    noise = torch.rand(3, size, size, generator=torch.Generator().manual_seed(5)) - 0.5
    return (255 * (colors + 0.12 * noise)).clamp(0, 255).to(torch.uint8)


def image_by_image(aug: Augmentation, images: Tensor, seed: int = 0) -> Tensor:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    transform = train_transform(aug, images.shape[-1], **STATISTICS)
    return torch.stack([transform(to_picture(image)) for image in images])


def same_distribution(one: np.ndarray, other: np.ndarray) -> float:
    return ks_2samp(one, other, method="asymp").pvalue


def all_at_once(aug: Augmentation, images: Tensor, seed: int = 0) -> Tensor:
    augment = BatchAugmentation(aug, images.shape[-1], **STATISTICS)
    return augment(images, torch.Generator().manual_seed(seed))


# Operations


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [17, 32])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_on_a_batch_is_pils_pixel_by_pixel(name, size, interpolation):
    images = synthetic_images(size).repeat(2, 1, 1, 1)
    generator = torch.Generator().manual_seed(1)
    level = 10 * torch.rand(len(images), generator=generator, dtype=torch.float64)
    level[::7], level[1::7], level[2::7] = 0, 9, 10
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(len(images) // 2)
    arguments = LEVELS[name](level / 10, sign)
    got = operate(name, images, arguments, torch.tensor(FILL, dtype=torch.uint8), interpolation)
    options = {"fillcolor": FILL, "resample": Image.Resampling[interpolation.upper()]}
    for image, argument, result in zip(images, arguments.tolist(), got, strict=True):
        whole = int(argument) if name.startswith(("Posterize", "Solarize")) else argument
        given = () if LEVEL_TO_ARG[name] is None else (whole,)
        expected = to_tensor(NAME_TO_OP[name](to_picture(image), *given, **options))
        assert torch.equal(result, expected), f"{name}({argument})"


def test_what_is_outside_has_the_mean_colour():
    aug = replace(NOTHING, auto_augment="rand-m10-n9-p1-inc1")
    black = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    expected = normalize(torch.tensor(FILL, dtype=torch.uint8).view(1, 3, 1, 1), **STATISTICS)
    for path in (image_by_image, all_at_once):
        assert (path(aug, black) == expected).all(1).any()


# Draws of RandAugment

POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m5-n3-mstd2-p0.8",
    "rand-m7-n1-inc1",
    "rand-m8-mstd101-inc1-p1",
    "rand-m14-mstd3-mmax20-inc1",
    "rand-m14-mstd3-mmax20",
]


def recorded_operations(policy: str, count: int) -> tuple[dict[str, list[float]], int]:
    """The arguments that timm gives each operation, for so many images, and how often it does."""
    random.seed(0)
    np.random.seed(0)
    transform = stages(Augmentation(auto_augment=policy), 32, **STATISTICS)[1].transforms[0]
    arguments: dict[str, list[float]] = {op.name: [] for op in transform.ops}
    for op in transform.ops:
        op.aug_fn = lambda image, *given, name=op.name, **_: arguments[name].append(
            given[0] if given else 0.0
        )
    for _ in range(count):
        transform(None)
    return arguments, count * transform.num_layers


@pytest.mark.parametrize("policy", POLICIES)
def test_operations_and_their_arguments_are_as_likely_as_timms(policy):
    expected, turns = recorded_operations(policy, IMAGES)
    transform = stages(Augmentation(auto_augment=policy), 32, **STATISTICS)[1].transforms[0]
    names, draw = batch_policy(transform)
    chosen, arguments = draw(IMAGES, torch.Generator().manual_seed(0))
    assert list(expected) == names and chosen.numel() == turns
    got = {name: arguments[chosen == index] for index, name in enumerate(names)}
    counts = [[len(values) for values in by_name.values()] for by_name in (expected, got)]
    table = np.array([[*row, turns - sum(row)] for row in counts])  # the last: left alone
    assert chi2_contingency(table[:, table.any(0)]).pvalue > 1e-3
    for name in names:
        if transform.ops[0].magnitude_std == 0:  # the values themselves, up to rounding
            near = np.round(expected[name], 9), np.round(got[name].numpy(), 9)
            assert set(near[0]) == set(near[1])
        else:
            assert same_distribution(expected[name], got[name].numpy()) > 1e-4, name


def test_the_operations_of_one_image_are_drawn_independently():
    transform = stages(Augmentation(), 32, **STATISTICS)[1].transforms[0]
    _, draw = batch_policy(transform)
    chosen, _ = draw(50_000, torch.Generator().manual_seed(0))
    table = torch.stack([*chosen]).unique(dim=1, return_counts=True)[1].view(16, 16)
    assert chi2_contingency(table).pvalue > 1e-3


# Whole pipelines


def describe(images: Tensor, source: Tensor) -> dict[str, np.ndarray]:
    """Statistics of augmented images that tell one augmentation from another: each (B,)."""
    mean, std = (torch.tensor(s)[:, None, None] for s in STATISTICS.values())
    levels = 255 * (images * std + mean)
    noise = ((levels - levels.round()).abs() > 0.01).any(1)  # no level of a picture: erased
    kept = torch.where(noise[:, None], 0, levels)
    left, right = kept.chunk(2, dim=3)
    top, bottom = kept.chunk(2, dim=2)
    statistics = {
        "erased": noise.float().mean((1, 2)),
        "mean": kept.mean((1, 2, 3)),
        "contrast": kept.std((1, 2, 3)),
        "red − blue": (kept[:, 0] - kept[:, 2]).mean((1, 2)),
        "left − right, red": (left - right)[:, 0].mean((1, 2)),
        "top − bottom, blue": (top - bottom)[:, 2].mean((1, 2)),
        "roughness": kept.diff(dim=3).abs().mean((1, 2, 3)),
        "black": ((kept.amax(1) < 0.5) & ~noise).float().mean((1, 2)),
        "fill": ((kept - torch.tensor(FILL)[:, None, None]).abs() < 0.5).all(1).sum((1, 2)),
        "changed": ((kept - source).abs() > 0.5).any(1).float().mean((1, 2)),
        "a corner": kept[:, 0, 1, 1],
        "a pixel": kept[:, 1, 11, 9],
        "another pixel": kept[:, 2, 20, 25],
    }
    return {name: values.numpy() for name, values in statistics.items()}


def p_value(expected: Tensor, got: Tensor) -> float:
    """Of Kolmogorov–Smirnov tests, one for each statistic: the smallest, times their number."""
    one, other = (describe(images, still_life()) for images in (expected, got))
    return min(len(one) * same_distribution(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def expected_by_default() -> Tensor:
    return image_by_image(Augmentation(), still_life().expand(IMAGES, -1, -1, -1))


PIPELINES = {
    "default": Augmentation(),
    "pad 2, flip 0.2": Augmentation(padding=2, flip=0.2, auto_augment=None, color_jitter=0.0),
    "jitter": Augmentation(crop="none", auto_augment=None, color_jitter=0.6, erasing=0.0),
    "jitter beyond 1": Augmentation(auto_augment=None, color_jitter=1.4),
    "not increasing": Augmentation(auto_augment="rand-m6-n3-mstd1-p0.9", erasing=0.5),
    "bilinear": Augmentation(interpolation="bilinear", auto_augment="rand-m9-mstd101-inc1-p1"),
    "always": Augmentation(flip=1.0, erasing=1.0),
}


@pytest.mark.parametrize("aug", PIPELINES.values(), ids=PIPELINES)
def test_a_batch_is_augmented_as_image_by_image_in_distribution(aug):
    images = still_life().expand(IMAGES, -1, -1, -1)
    assert p_value(image_by_image(aug, images), all_at_once(aug, images)) > 1e-3


WRONG = {
    "flip": Augmentation(flip=0.3),
    "magnitude": Augmentation(auto_augment="rand-m5-mstd0.5-inc1"),
    "layers": Augmentation(auto_augment="rand-m9-n4-mstd0.5-inc1"),
    "probability": Augmentation(auto_augment="rand-m9-mstd0.5-inc1-p0.7"),
    "not increasing": Augmentation(auto_augment="rand-m9-mstd0.5"),
    "erasing": Augmentation(erasing=0.1),
    "padding": Augmentation(padding=2),
    "no crop": Augmentation(crop="none"),
    "no RandAugment": Augmentation(auto_augment=None),
}


@pytest.mark.parametrize("aug", WRONG.values(), ids=WRONG)
def test_another_augmentation_is_told_apart(aug, expected_by_default):
    images = still_life().expand(IMAGES, -1, -1, -1)
    assert p_value(expected_by_default, all_at_once(aug, images)) < 1e-6


def test_every_crop_and_its_mirror_image_are_equally_likely():
    size, padding = 8, 2
    number = torch.arange(1, size**2 + 1).view(1, size, size).repeat(3, 1, 1).to(torch.uint8)
    padded = torch.nn.functional.pad(number, [padding] * 4)
    crops = [padded[:, y : y + size, x : x + size] for y in range(5) for x in range(5)]
    possible = torch.stack([*crops, *[crop.flip(2) for crop in crops]])
    aug = replace(NOTHING, crop="pad", padding=padding, flip=0.5)
    got = all_at_once(aug, number.expand(IMAGES, -1, -1, -1))
    same = (got[:, None] == normalize(possible, **STATISTICS)).flatten(2).all(2)
    assert same.any(1).all()
    assert chisquare(same.sum(0).numpy()).pvalue > 1e-3


def test_an_erased_rectangle_is_normal_noise_and_the_rest_stays():
    aug = replace(NOTHING, erasing=1.0)
    images = still_life().expand(IMAGES, -1, -1, -1)
    got, untouched = all_at_once(aug, images), normalize(images, **STATISTICS)
    changed = got != untouched
    for mask, values in zip(changed[:50].all(1), got, strict=False):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.all() and box.sum() == mask.sum() and torch.isfinite(values).all()
    assert kstest(got[changed][::50].numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("size", [4, 15, 32])
def test_erased_rectangles_are_as_large_and_lie_where_timms_do(size):
    aug = replace(NOTHING, erasing=0.8)
    images = torch.full((IMAGES, 3, size, size), 128, dtype=torch.uint8)
    masks = [
        (path(aug, images) != normalize(images, **STATISTICS)).all(1).double()
        for path in (image_by_image, all_at_once)
    ]
    for statistic in (
        lambda m: m.sum((1, 2)),
        lambda m: m.any(2).sum(1),
        lambda m: m.any(2).double().argmax(1),
        lambda m: m.any(1).double().argmax(1),
    ):
        assert same_distribution(*(statistic(mask).numpy() for mask in masks)) > 1e-3


# Batches


def test_without_augmentation_both_paths_normalise():
    images = synthetic_images(32)
    expected = normalize(images, **STATISTICS)
    assert torch.equal(all_at_once(NOTHING, images), expected)
    assert torch.equal(image_by_image(NOTHING, images), expected)


def test_the_generator_decides_everything():
    images = still_life().expand(64, -1, -1, -1)
    first, torch_state = all_at_once(Augmentation(), images), torch.get_rng_state()
    assert torch.equal(first, all_at_once(Augmentation(), images))
    assert not torch.equal(first, all_at_once(Augmentation(), images, seed=1))
    assert torch.equal(torch_state, torch.get_rng_state())


def test_images_are_left_as_they_are_and_results_need_no_gradient():
    images = synthetic_images(32)
    before = images.clone()
    result = all_at_once(Augmentation(crop="none", flip=0.0, erasing=1.0), images)
    assert torch.equal(images, before)
    assert result.shape == images.shape and result.dtype == torch.float32
    assert not result.requires_grad


@pytest.mark.parametrize("count", [1, 2, 5])
def test_small_batches_will_do(count):
    assert all_at_once(Augmentation(), synthetic_images(32)[:count]).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_gives_what_the_cpu_does_without_waiting():
    images = still_life().expand(IMAGES, -1, -1, -1)
    aug = Augmentation(erasing=0.0)
    on_device = images.cuda()
    all_at_once(Augmentation(), on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = all_at_once(aug, on_device)
        all_at_once(Augmentation(), on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(result.cpu(), all_at_once(aug, images))


# The image-by-image path


def test_a_random_part_of_a_large_picture_is_resized():
    picture = to_picture(still_life(64))
    result = train_transform(Augmentation(crop="resized"), 32, **STATISTICS)(picture)
    assert result.shape == (3, 32, 32) and result.dtype == torch.float32


def test_without_a_crop_a_picture_is_resized_whole():
    picture = to_picture(still_life(64)).crop((0, 0, 64, 48))
    expected = to_tensor(picture.resize((32, 32), Image.Resampling.BICUBIC))
    result = train_transform(NOTHING, 32, **STATISTICS)(picture)
    assert torch.equal(result, normalize(expected[None], **STATISTICS)[0])


def test_evaluation_leaves_a_picture_of_the_right_size_as_it_is():
    picture = to_picture(still_life())
    expected = normalize(still_life()[None], **STATISTICS)[0]
    assert torch.equal(eval_transform(32, **STATISTICS)(picture), expected)


def test_evaluation_resizes_the_shorter_side_and_cuts_out_the_centre():
    picture = to_picture(still_life(64)).crop((0, 0, 64, 48))
    resized = picture.resize((53, 40), Image.Resampling.BICUBIC)  # 40 = 32 / 0.8
    expected = to_tensor(resized.crop((10, 4, 42, 36)))
    result = eval_transform(32, **STATISTICS, crop_pct=0.8, interpolation="bicubic")(picture)
    assert torch.equal(result, normalize(expected[None], **STATISTICS)[0])


# Errors


@pytest.mark.parametrize(
    ("aug", "message"),
    [
        (Augmentation(crop="resized"), "image by image"),
        (Augmentation(auto_augment="rand-m9-tweights"), "weights"),
        (Augmentation(auto_augment="rand-m9-t3a"), "Desaturate, GaussianBlur"),
        (Augmentation(auto_augment="augmix-m3-w3"), "AugMixAugment"),
        (Augmentation(auto_augment="v0"), "AutoAugment"),
        (Augmentation(auto_augment="rand-q3"), "'rand-q3'"),
        (Augmentation(auto_augment="nonsense"), "'nonsense'"),
    ],
)
def test_what_a_batch_cannot_do_is_named(aug, message):
    with pytest.raises(ValueError, match=message):
        BatchAugmentation(aug, 32, **STATISTICS)


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 32, 32), torch.zeros(2, 3, 16, 16, dtype=torch.uint8)],
    ids=["float", "size"],
)
def test_images_of_another_kind_are_refused(images):
    augment = BatchAugmentation(Augmentation(), 32, **STATISTICS)
    with pytest.raises(ValueError, match=r"uint8 \(B, 3, 32, 32\)"):
        augment(images, torch.Generator())


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip": 1.5},
        {"erasing": -0.1},
        {"padding": -1},
        {"color_jitter": -1.0},
        {"crop": "center"},
        {"interpolation": "lanczos"},
        {"flip": float("nan")},
    ],
    ids=str,
)
def test_an_augmentation_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Augmentation(**wrong)
