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
import torch.nn.functional as F
from near_inputs import make_near

from inputs import gradients, make_inputs, make_mask
from kernels import interpreted, needs_triton, run, use_tiles
from ripple_attention import (
    LinearAttention,
    NearSoftmax,
    Partition,
    RippleAttention,
    chebyshev,
    foveal,
    linear_attention,
    ripple_attention,
)
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


@pytest.mark.parametrize("partition", [Partition((9,)), foveal(1, 8, 1)], ids=["wide", "coarse"])
@needs_triton
@interpreted
def test_kernels_of_shared_sums_keep_what_is_not_finite(partition):
    inputs, values = broken_inputs((2, 12), torch.float32, partition, (torch.inf,))
    function = run("tile_sums_triton", partition)
    assert_operator_keeps(function, inputs, values, partition, None)


def by_pairs(partition, distance, mask, prefix_mask):
    """The definition, of one pair after the other: what does not count is not computed.

    Args:
        partition: Which tokens are a group.
        distance: Up to which radius tokens weigh by softmax; None for features everywhere.
        mask, prefix_mask: The same for all images, or None.
    """

    def function(q, k, phi_q, phi_k, v, weights, far_scale, prefix_k=None, prefix_v=None):
        B, H, W, N, D = q.shape
        L, P = H * W, 0 if prefix_k is None else prefix_k.shape[1]
        tokens = (x.flatten(1, 2) for x in (q, k, phi_q, phi_k, v, weights, far_scale))
        q, k, phi_q, phi_k, v, weights, far_scale = tokens
        group = partition.pair_groups((H, W)) + (P > 0)
        if P:  # tokens L, L + 1, …
            v, group = torch.cat([v, prefix_v], 1), F.pad(group, (0, P))
            k, phi_k = (
                torch.cat([x, prefix_k if x.shape[-1] == prefix_k.shape[-1] else x[:, :P]], 1)
                for x in (k, phi_k)
            )
        hidden = torch.zeros(L + P, dtype=torch.bool)
        if mask is not None:
            hidden[:L] = mask[0].flatten()
        if prefix_mask is not None:
            hidden[L:] = prefix_mask[0]
        by_softmax = torch.zeros_like(group, dtype=torch.bool)
        if distance is not None:
            by_softmax = group <= partition.radii.index(distance) + (P > 0)
        i, j = (by_softmax & ~hidden).nonzero().T
        a, b = (~by_softmax & ~hidden).nonzero().T
        k = k + (k - k)  # no score of −∞ hides an infinite key
        scores = (q[:, i] * k[:, j]).sum(-1) * D**-0.5
        largest = torch.zeros(B, L, N, dtype=q.dtype)
        if distance is not None:
            top = scores.detach().nan_to_num(0, 1e300, -1e300)
            largest = largest.index_reduce(1, i, top, "amax", include_self=False)
        alpha = weights.movedim(-1, 0)  # (G, B, L, N)
        near = alpha[group[i, j], :, i].movedim(0, 1) * (scores - largest[:, i]).exp()
        far = alpha[group[a, b], :, a].movedim(0, 1) * (phi_q[:, a] * phi_k[:, b]).sum(-1)
        if distance is not None:
            exponent = far_scale - largest
            cut = torch.where(exponent.isnan(), exponent, exponent.clamp(max=60))
            far = far * cut.exp()[:, a]
        total = torch.zeros_like(largest).index_add(1, i, near).index_add(1, a, far)
        sums = torch.zeros(B, L, N, v.shape[-1], dtype=q.dtype)
        sums = sums.index_add(1, i, near.unsqueeze(-1) * v[:, j])
        sums = sums.index_add(1, a, far.unsqueeze(-1) * v[:, b])
        total = total.unsqueeze(-1)
        out = torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total))
        return out.unflatten(1, (H, W))

    return function


def two_kernels(name, partition, distance, mask, prefix_mask):
    """The operator with all it takes beside; without `distance`, by features alone."""

    def function(q, k, phi_q, phi_k, v, weights, far_scale, prefix_k=None, prefix_v=None):
        near = None if distance is None else NearSoftmax(q, k, far_scale, distance)
        return ripple_attention(
            phi_q, phi_k, v, weights, partition=partition, near=near, prefix_k=prefix_k,
            prefix_v=prefix_v, prefix_padding_mask=prefix_mask, key_padding_mask=mask,
            implementation=name,
        )  # fmt: skip

    return function


def assert_two_kernels_keep(
    name, grid, partition, distance, prefix, masked, values=VALUES[:3], dtype=torch.float32
):
    """Infinities and NaN in each input of the operator, prefix tokens and all."""
    whole = make_near(grid, partition, prefix, dtype=dtype)
    if distance is None and prefix:  # keys that are mapped
        whole = (*whole[:7], whole[7][..., :5].sigmoid(), whole[8])
    used = range(2 if distance is None else 0, len(whole))
    cases = [c for c in product(used, values) if distance or c[0] != 6]
    inputs = tuple(x[:1].repeat(len(cases), *[1] * (x.dim() - 1)) for x in whole)
    for image, (which, value) in enumerate(cases):
        broken = inputs[which][image]
        place = (0,) if which > 6 else (1, grid[1] // 3)
        broken[(*place, 1, 1)[: broken.dim()]] = value
    mask = prefix_mask = None
    if masked:
        mask = make_mask("random", grid, 1).expand(len(cases), -1, -1).contiguous()
        prefix_mask = torch.arange(prefix).expand(len(cases), -1) == 1 if prefix else None
    arguments = partition, distance, mask, prefix_mask
    if distance is None:  # q, k and the scale have no part in it
        q, k, scale = inputs[0], inputs[1], inputs[6]
        fix = lambda f: lambda x, *some: f(q.to(x), k.to(x), x, *some[:3], scale.to(x), *some[3:])
        inputs = (*inputs[2:6], *inputs[7:])
    else:
        fix = lambda f: f
    ours = gradients(fix(two_kernels(name, *arguments)), inputs)
    exact = gradients(fix(by_pairs(*arguments)), tuple(x.double() for x in inputs))
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    pairs = zip((ours[0], *ours[1]), (exact[0], *exact[1]), strict=True)
    for i, (x, reference) in enumerate(pairs):
        heads = 2 if x.shape[1] == prefix else 3
        axes = [axis for axis in range(1, x.dim()) if axis != heads]
        scale = reference.abs().nan_to_num(0, 0, 0).amax(axes, keepdim=True)
        wrong = x.isfinite() & ~((x.double() - reference).abs() <= tolerance * scale)
        assert not wrong.any(), (i, wrong.nonzero()[0], [cases[n] for n in wrong.nonzero()[:3, 0]])
        assert x.select(heads, 0).isfinite().all()  # the other head
    assert not exact[0].isfinite().all() and exact[0].isfinite().any()


KINDS = {  # grid, partition, near up to which distance
    "window": (WINDOW, PARTITION, 1),
    "tiles": ((3, 12), PARTITION, 1),
    "coarse": ((3, 18), foveal(2, 8, 1), 1),
    "coarse, by features": ((3, 18), foveal(2, 8, 1), None),
    "by features": ((3, 12), PARTITION, None),
}


COARSE = ("naive", "tile_sums")  # algorithms that take coarse rings


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(COARSE, KINDS), *product(("table", "tiled"), ("window", "tiles", "by features"))],
)
def test_softmax_prefix_tokens_and_coarse_rings_keep_what_is_not_finite(name, kind, prefix):
    grid, partition, distance = KINDS[kind]
    assert_two_kernels_keep(name, grid, partition, distance, prefix, masked=prefix > 0)


@pytest.mark.parametrize("kind", KINDS)
@needs_triton
@interpreted
def test_kernels_of_softmax_and_coarse_rings_keep_what_is_not_finite(kind):
    grid, partition, distance = KINDS[kind]
    use_tiles(384 if kind == "window" else 0)
    name = "tile_sums_triton" if partition.tile else "tiled_triton"
    values, dtype = VALUES[::2], torch.float16 if "coarse" in kind else torch.float32
    assert_two_kernels_keep(name, grid, partition, distance, 2, True, values, dtype)


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
