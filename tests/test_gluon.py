"""The kernels in Gluon: run on a CPU as NumPy, and compiled for GPUs not present."""

from contextlib import contextmanager

import pytest
import torch

from inputs import make_inputs, make_mask, relative_error
from kernels import (
    HERE,
    AbsentGPU,
    CompileOnly,
    assert_within_twice,
    interpreted,
    needs_triton,
    run,
    use_tiles,
)
from ripple_attention import Partition, chebyshev, logarithmic

pytestmark = needs_triton

OF_STRIPS = ["strip_kernel", "slab_gradient_kernel"]
OF_IMAGES = ["image_kernel", "image_gradient_kernel", "image_key_kernel"]
SLAB_GRIDS = [((17, 19), 2), ((16, 14), 0)]  # and tiles of a strip, or none


@contextmanager
def slabs_on_the_cpu(tiles):
    """Slabs as NumPy, by strips of so many tiles, or as a whole; gives a list of launches."""
    from gluon_on_cpu import launcher

    from ripple_attention.ops import (
        image_keys_gluon,
        slab_gradients_gluon,
        slab_parts_gluon,
        slabs_gluon,
        tiled_triton,
    )

    if tiles:
        use_tiles()
    modules = slabs_gluon, slab_gradients_gluon, image_keys_gluon
    plain, launched = launcher(slab_parts_gluon, *modules), []

    def counted(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        plain(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "launch", counted)
        patch.setattr(slabs_gluon, "_tiles_of_a_strip", lambda *_: tiles)
        patch.setattr(tiled_triton, "SLABS", True)
        yield launched


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(("capability", "wide"), [(80, True), (90, False)])
@pytest.mark.parametrize(
    ("grid", "tiles", "partition"),
    [
        *(((14, 16), 0, x) for x in (chebyshev(1), chebyshev(4), logarithmic(3), chebyshev(5))),
        *(((20, 30), 1, x) for x in (chebyshev(1), chebyshev(5))),
        *(((20, 30), 4, x) for x in (logarithmic(3), chebyshev(4))),
    ],
)
def test_slabs_compile(grid, tiles, partition, capability, wide, monkeypatch):
    from triton.runtime.driver import driver

    from ripple_attention.ops import (
        image_keys_gluon,
        slab_gradients_gluon,
        slabs_gluon,
        tiled_triton,
        triton_support,
    )

    compiled = []
    monkeypatch.setattr(driver, "_active", AbsentGPU(capability))
    for module in (slabs_gluon, slab_gradients_gluon, image_keys_gluon):
        for name in OF_STRIPS + OF_IMAGES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, CompileOnly(getattr(module, name), compiled))
    q, k, v = torch.zeros(1, *grid, 3, 2, 32, dtype=torch.bfloat16).unbind(3)
    weights = torch.zeros(1, *grid, 2, partition.num_groups)
    monkeypatch.setattr(slabs_gluon, "_tiles_of_a_strip", lambda *_: tiles)
    radii, whole = list(partition.radii), tiles == 0
    cut = v.new_zeros(0) if whole else v.new_zeros(1, 2, 67, 32)
    assert cut.shape == triton_support.far_sums_like(v, 32, radii).shape
    groups = tiled_triton._padded_groups(len(radii))
    denominator, scaled = weights[..., 0].contiguous(), torch.zeros(1, *grid, 2, groups)
    assert slabs_gluon.serves(whole, radii, q, k, v)
    inputs = q, k, v, weights
    for asked in (denominator, None):
        slabs_gluon.launch_slabs(*inputs, cut, v, asked, radii, 0.0, wide)
    results = denominator, denominator, scaled, q, weights
    slab_gradients_gluon.launch_slab_gradient(v, *inputs, v, denominator, cut, results, radii, wide)
    if whole:
        rest = scaled, denominator, q, v, radii, wide
        image_keys_gluon.launch_image_keys(v, q, k, v, *rest)
    forward, *gradients = OF_IMAGES if whole else OF_STRIPS
    assert [name for name, _ in compiled] == [forward, forward, *gradients]
    for _, binary in compiled:
        assert "mma.sync" in binary.asm["ptx"]
        assert binary.metadata.shared <= 56 * 1024  # four programs at a time on an H200
    if whole:  # one shuffle a pair: 16 in a thread, of each of seven slabs and both tiles
        assert compiled[-1][1].asm["ptx"].count("shfl.sync.idx") == 16 * 7 * 2


def test_slabs_serve_near_windows_of_32_channels():
    from ripple_attention.ops.slabs_gluon import serves

    x = torch.zeros(1, 9, 16, 1, 48, dtype=torch.bfloat16)
    near, far = x[..., 16:], x[..., 8:40].contiguous()
    for whole in (False, True):
        assert serves(whole, [0, 1, 2, 3], near, near, far)
        assert not serves(whole, [0, 5], far, far, far) and not serves(whole, [0], x, far, far)
        between = torch.zeros(1, 9, 16, 1, 40, dtype=x.dtype)[..., :32]
        for other in (x, far.float(), x[..., 4:36], between):
            assert not serves(whole, [0], far, far, other)
    for grid in ((8, 16), (16, 17)):
        x = torch.zeros(1, *grid, 1, 32, dtype=torch.bfloat16)
        assert serves(False, [0], x, x, x) and not serves(True, [0], x, x, x)
    x = torch.zeros(1, 9, 9, 1, 32, dtype=torch.bfloat16)
    assert serves(True, [3], x, x, x) and not serves(True, [4], x, x, x)  # nothing but the window


@pytest.mark.parametrize(
    ("grid", "partition", "mask_kind", "eps", "tiles"),
    [
        ((17, 16), chebyshev(4), "none", 0.0, 1),
        ((17, 18), chebyshev(5), "rows", 0.5, 2),
        ((50, 9), chebyshev(4), "random", 0.0, 8),
        ((3, 70), logarithmic(3), "random", 0.0, 1),
        ((10, 8), chebyshev(1), "none", 0.5, 4),
        ((16, 16), chebyshev(4), "rows", 0.0, 0),
        ((9, 14), chebyshev(5), "none", 0.5, 0),
        ((15, 11), Partition((1, 4)), "random", 0.5, 0),
        ((16, 9), logarithmic(3), "none", 0.0, 0),
    ],
    ids=str,
)
@interpreted
def test_slabs_are_as_precise_as_tiled(grid, partition, mask_kind, eps, tiles):
    """By strips of so many tiles, or as a whole."""
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "heads": 2}
    inputs = make_inputs(grid, partition, **options)
    with slabs_on_the_cpu(tiles) as launched:
        assert_within_twice("tiled", partition, inputs, make_mask(mask_kind, grid), eps)
    assert launched == (OF_STRIPS if tiles else OF_IMAGES)


@pytest.mark.parametrize("eps", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize(("grid", "tiles"), SLAB_GRIDS)
@interpreted
def test_slabs_give_zeros_where_queries_see_dead_keys_alone(grid, tiles, eps):
    partition = chebyshev(4)
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "batch": 1, "heads": 1}
    q, k, v, weights = make_inputs(grid, partition, **options)
    dead = torch.ones(grid, dtype=torch.bool)
    dead[4:7, 9:12] = False
    k[:, dead] = 0
    weights = torch.zeros_like(weights)
    weights[..., -1] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    with slabs_on_the_cpu(tiles) as launched:
        blind = run("tiled_triton", partition, eps=eps)(*leaves)[:, 3:8, 8:13]
        grads = torch.autograd.grad(blind.sum(), leaves)
    assert launched == (OF_STRIPS if tiles else OF_IMAGES)
    assert blind.abs().max() <= (1e-3 if eps == 0.5 else 0)
    assert all(grad.isfinite().all() for grad in grads)
    if eps == 0:
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize(("grid", "tiles"), SLAB_GRIDS)
@interpreted
def test_slabs_keep_the_bits_of_far_sums(grid, tiles):
    """Where high parts of a sum cancel each other: all groups weigh the same, so all is far."""
    from ripple_attention.ops import tiled_triton

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *grid, 3, 1, 32, generator=generator).bfloat16()
    k, v, q = (8 + noise[:, :, :, 0] / 4, 8 + noise[:, :, :, 1] / 4, 0 * noise[:, :, :, 2])
    q[..., 0], q[..., 5] = 1, -1
    weights = torch.ones(1, *grid, 1, 5).bfloat16()
    upstream = torch.zeros_like(v)
    upstream[..., 3], upstream[..., 4] = 1, -1
    sums = torch.einsum("bhwnm,bhwne->bnme", k.double(), v.double())[:, None, None]
    ones = k.double().sum((1, 2))[:, None, None]
    radii = [0, 1, 2, 3]
    with slabs_on_the_cpu(tiles) as launched:
        out, below, cut = tiled_triton.tiled_triton_forward(q, k, v, weights, radii, 0.5)
        unit = torch.ones_like(below)
        grad = tiled_triton.tiled_triton_backward(
            upstream, q, k, v, weights, torch.zeros_like(out), unit, cut, radii
        )[0]
    assert launched == (OF_STRIPS if tiles else OF_IMAGES)
    exact = (ones[..., 0] - ones[..., 5] + 0.5).expand_as(below)
    assert relative_error(below, exact) < 1e-5
    numerator = (sums[..., 0, :] - sums[..., 5, :]).expand(out.shape)
    assert relative_error(out * below.unsqueeze(-1), numerator) < 0.2  # of 16 bits; of 8, 17
    assert relative_error(grad, (sums[..., 3] - sums[..., 4]).expand(grad.shape)) < 2e-2


@interpreted
def test_whole_slabs_are_precise_where_a_window_is_taken_out():
    """Most of the mass in the window, most of the weight in the rest."""
    grid, partition = (9, 14), chebyshev(5)
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "heads": 1}
    q, k, v, weights = make_inputs(grid, partition, **options)
    k[:, :, 9:] *= 0.02
    weights = torch.cat([0.01 * weights[..., :-1], torch.ones_like(weights[..., -1:])], -1)
    with slabs_on_the_cpu(0) as launched:
        assert_within_twice("tiled", partition, (q, k, v, weights))
    assert launched == OF_IMAGES
