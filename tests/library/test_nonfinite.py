"""What is not finite stays so, forward and backward: a finite result is a right one.

One number of one head of an image is an infinity, NaN, or so large that sums overflow. Wherever an
algorithm's output or gradient is finite, it must be that of the definition in float64, which
overflows nowhere: so it is no 0 where the definition has NaN. The other images and heads must not
notice.
"""

from functools import partial
from itertools import product

import pytest
import torch

from inputs import gradients, make_inputs, make_mask
from kernels import interpreted, needs_triton, run, use_tiles
from ripple_attention import LinearAttention, RippleAttention, chebyshev, linear_attention
from ripple_attention.ops.common import without_padding
from ripple_attention.ops.export import ripple_export
from ripple_attention.ops.tiling import is_single_window

VALUES = (torch.inf, -torch.inf, torch.nan, 3e38)
PLACES = ((0, 2), (1, 2), (2, 1), (3, 0), (3, -1))  # of q, k, v, the nearest weight, the rest's
PARTITION = chebyshev(2)
WINDOW, TILES = (3, 4), (3, 36)  # grids that are one window, and that have a far part


def broken_inputs(grid, dtype, partition=PARTITION, values=VALUES):
    """One image for each place and value, of which the head 1 has the number; and its number."""
    cases = list(product(PLACES, values))
    inputs = make_inputs(grid, partition, batch=len(cases), dtype=dtype)
    for image, ((which, channel), value) in enumerate(cases):
        inputs[which][image, 1, grid[1] // 3, 1, channel] = value
    return inputs, torch.tensor([value for _, value in cases])


def assert_finite_is_right(got, exact, values, tolerance, spreads=False):
    """Compares (output, gradients); the largest number of an image's head is the scale of each.

    Args:
        spreads: Whether the output may be infinite or NaN where that of the definition is not.
    """
    pairs = zip((got[0], *got[1]), (exact[0], *exact[1]), strict=True)
    for i, (ours, reference) in enumerate(pairs):
        scale = reference.abs().nan_to_num(0, 0, 0).amax((1, 2, 4), keepdim=True)
        wrong = ours.isfinite() & ~((ours.double() - reference).abs() <= tolerance * scale)
        assert not wrong.any(), (i, wrong.nonzero())
        assert ours[..., 0, :].isfinite().all()  # the other head
    certain = values.abs() != 3e38  # where nothing is left to an algorithm's own sums
    if not spreads:
        assert torch.equal(got[0].isfinite()[certain], exact[0].isfinite()[certain])


def assert_operator_keeps(
    function, inputs, values, partition, mask, *, tolerance=1e-4, spreads=False
):
    exact = gradients(run("naive", partition, mask), tuple(x.double() for x in inputs))
    assert_finite_is_right(gradients(function, inputs), exact, values, tolerance, spreads)


@pytest.mark.parametrize("mask_kind", ["none", "random"])
@pytest.mark.parametrize("grid", [WINDOW, TILES])
@pytest.mark.parametrize("name", ["naive", "table", "tiled"])
def test_pytorch_algorithms_keep_what_is_not_finite(name, grid, mask_kind):
    inputs, values = broken_inputs(grid, torch.float32)
    mask = make_mask(mask_kind, grid, len(values))
    assert_operator_keeps(run(name, PARTITION, mask), inputs, values, PARTITION, mask)


@pytest.mark.parametrize("mask_kind", ["none", "random"])
@pytest.mark.parametrize("grid", [WINDOW, TILES])
def test_what_is_exported_keeps_what_is_not_finite(grid, mask_kind):
    inputs, values = broken_inputs(grid, torch.float32)
    mask = make_mask(mask_kind, grid, len(values))

    def exported(q, k, v, weights):
        if mask is not None:
            k, v = without_padding(k, v, mask)
        return ripple_export(q, k, v, weights, list(PARTITION.radii), 0.0)

    # Here, the weights of groups that are all padding count.
    assert_operator_keeps(exported, inputs, values, PARTITION, mask, spreads=mask is not None)


KERNELS = {  # name, grid, partition
    "window": ("tiled_triton", WINDOW, PARTITION),
    "far": ("tiled_triton", (3, 22), chebyshev(1)),
    "boxes": ("table_triton", WINDOW, chebyshev(1)),
    "pairs": ("naive_triton", WINDOW, PARTITION),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", KERNELS)
@needs_triton
@interpreted
def test_kernels_keep_what_is_not_finite(case, dtype):
    name, grid, partition = KERNELS[case]
    use_tiles(0 if case == "far" else 384)
    assert is_single_window(*grid, partition.radii) == (case != "far")
    inputs, values = broken_inputs(grid, dtype, partition, (torch.inf, torch.nan, 3e38))
    mask = make_mask("random", grid, len(values))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    function = run(name, partition, mask)
    assert_operator_keeps(function, inputs, values, partition, mask, tolerance=tolerance)


def test_linear_attention_keeps_what_is_not_finite():
    inputs, values = broken_inputs(WINDOW, torch.float32)
    images = values[:12]  # without those of the weights
    qkv = tuple(x[: len(images)] for x in inputs[:3])
    exact = gradients(linear_attention, tuple(x.double() for x in qkv))
    assert_finite_is_right(gradients(linear_attention, qkv), exact, images, 1e-4)


@pytest.mark.parametrize(
    ("kind", "feature_map"),
    [
        (RippleAttention, "learned"),
        (LinearAttention, "learned"),
        (RippleAttention, "elu"),
        (LinearAttention, "t2r"),
        (LinearAttention, "hedgehog"),
    ],
)
@needs_triton
@interpreted
def test_fused_layers_keep_what_is_not_finite(kind, feature_map):
    use_tiles(0 if feature_map == "learned" else 384)
    torch.manual_seed(0)
    values = torch.tensor((torch.inf, torch.nan) * 3)
    grid = (3, 22) if feature_map == "learned" else WINDOW
    qkv = torch.randn(len(values), *grid, 3, 2, 8)
    for image, value in enumerate(values):
        qkv[image, 1, 2, image // 2, 1, 2] = value
    options = {"max_distance": 1} if kind is RippleAttention else {}
    make = partial(kind, 16, num_heads=2, feature_map=feature_map, eps=0.0, **options)
    layer = make()
    specs = layer.feature_map.fused_spec(), layer._weight_spec(qkv[:, :, :, 2])
    got = gradients(lambda x: layer._attend_fused(x, None, *specs), (qkv,))
    wide = make().double()
    wide.load_state_dict(layer.state_dict())
    wide.implementation = "naive"
    exact = gradients(lambda x: wide.attend(*x.unbind(3), None), (qkv.double(),))
    assert_finite_is_right(*(flat_heads(x) for x in (got, exact)), values, 1e-3)


def flat_heads(results):
    """Gradients of qkv (B, H, W, 3, N, D) as those of heads of 3·D channels."""
    out, (grad,) = results
    return out, (grad.transpose(3, 4).flatten(4),)
