"""The same promises on a GPU. Skipped, visibly, where there is none."""

import pytest
import torch

from inputs import gradients, make_inputs, make_mask, relative_error
from ripple_attention import RippleAttention, chebyshev, logarithmic, ripple_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IMPLEMENTATIONS = ["naive", "table", "tiled"]


def run(implementation, partition, mask=None, eps=0.0):
    return lambda *tensors: ripple_attention(
        *tensors,
        partition=partition,
        key_padding_mask=mask,
        implementation=implementation,
        eps=eps,
    )


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("mask_kind", ["none", "rows"])
@pytest.mark.parametrize("grid", [(1, 1), (7, 5), (33, 20)])
@pytest.mark.parametrize("partition", [chebyshev(4), chebyshev(40), logarithmic(9)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_the_definition_on_the_cpu(implementation, partition, grid, mask_kind, eps):
    inputs, mask = make_inputs(grid, partition), make_mask(mask_kind, grid)
    expected = gradients(run("naive", partition, mask, eps), inputs)
    mask = mask if mask is None else mask.cuda()
    got = gradients(run(implementation, partition, mask, eps), tuple(x.cuda() for x in inputs))
    for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert relative_error(ours.cpu(), reference) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiled_error_is_within_twice_naives_at_the_same_precision(dtype):
    partition = chebyshev(4)
    inputs = make_inputs((33, 20), partition, dtype=dtype, features=16, value_dim=8)
    inputs = tuple(x.cuda() for x in inputs)
    exact = gradients(run("naive", partition), tuple(x.double() for x in inputs))
    naive = gradients(run("naive", partition), inputs)
    tiled = gradients(run("tiled", partition), inputs)
    for ours, theirs, reference in zip(
        (tiled[0], *tiled[1]), (naive[0], *naive[1]), (exact[0], *exact[1]), strict=True
    ):
        rounding = torch.finfo(dtype).eps
        assert relative_error(ours, reference) <= 2 * relative_error(theirs, reference) + rounding


def test_a_compiled_layer_trains_under_autocast():
    torch.manual_seed(0)
    layer = RippleAttention(48, num_heads=3).cuda()
    x = torch.randn(2, 20, 30, 48, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        expected, got = layer(x), compiled(x)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, expected) < 2e-2
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
