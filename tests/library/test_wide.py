"""Wide boxes and coarse rings by sums that tiles share, against the definition."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inputs import GRIDS, MASKS, gradients, make_inputs, make_mask, relative_error
from ripple_attention import (
    Partition,
    RippleAttention,
    chebyshev,
    foveal,
    logarithmic,
    ripple_attention,
)

ALIGNED = [logarithmic(31), Partition((15,)), Partition((7, 23))]
UNALIGNED = [Partition((8,)), Partition((0, 9, 14, 20)), chebyshev(12)]
COARSE = [foveal(), foveal(1, 1, 1), foveal(2, 3, 2), foveal(8, 8, 1), Partition((1, 3), 5, (2,))]


def run(implementation, partition, mask=None, eps=0.0):
    def function(*inputs):
        return ripple_attention(
            *inputs,
            partition=partition,
            key_padding_mask=mask,
            implementation=implementation,
            eps=eps,
        )

    return function


def worst_error(partition, grid, mask=None, eps=0.0, implementation="tile_sums", **options):
    """Of the output and of every gradient, against `naive`."""
    inputs = make_inputs(grid, partition, **options)
    expected = gradients(run("naive", partition, mask, eps), inputs)
    got = gradients(run(implementation, partition, mask, eps), inputs)
    pairs = zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True)
    return max(relative_error(ours, reference) for ours, reference in pairs)


@pytest.mark.parametrize("mask_kind", ["none", "rows"])
@pytest.mark.parametrize("grid", [*GRIDS, (5, 60), (47, 18)])
@pytest.mark.parametrize("partition", [*ALIGNED, *UNALIGNED, *COARSE], ids=lambda p: str(p.bounds))
def test_tile_sums_match_naive_in_float64(partition, grid, mask_kind):
    assert worst_error(partition, grid, make_mask(mask_kind, grid), 0.5) <= 1e-10
    assert worst_error(partition, grid, make_mask(mask_kind, grid), heads=1) <= 1e-10


@pytest.mark.parametrize("partition", [logarithmic(20), foveal()])
def test_tile_sums_of_wide_features_and_values_match_naive(partition):
    error = worst_error(partition, (25, 40), batch=1, heads=1, features=128, value_dim=128)
    assert error <= 1e-10


coarse = st.builds(
    lambda tile, reach, rings: foveal(min(reach, tile), tile, rings),
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 3),
)  # fmt: skip
boxes = st.sets(st.integers(0, 40), min_size=1, max_size=5).map(lambda x: Partition(sorted(x)))


@settings(max_examples=40, deadline=None)
@given(
    partition=boxes | coarse,
    grid=st.tuples(st.integers(1, 45), st.integers(1, 45)),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 9),
)
def test_tile_sums_match_naive_in_random_cases(partition, grid, mask, seed):
    error = worst_error(
        partition, grid, make_mask(mask, grid, 1), batch=1, heads=1, features=3, value_dim=2,
        seed=seed,
    )  # fmt: skip
    assert error <= 1e-10


@pytest.mark.parametrize("partition", [Partition((0, 8)), foveal(2, 2, 1)])
def test_tile_sums_pass_gradcheck(partition):
    inputs = make_inputs((3, 12), partition, batch=1, heads=1, features=3, value_dim=2)
    leaves = tuple(x.requires_grad_() for x in (inputs[0] + 0.1, inputs[1] + 0.1, *inputs[2:]))
    mask = torch.zeros(1, 3, 12, dtype=torch.bool)
    mask[0, 1:, 9] = True
    function = run("tile_sums", partition, mask, 0.5)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("partition", [logarithmic(20), foveal(2, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_wide_boxes_and_coarse_rings(partition, dtype):
    inputs = make_inputs((9, 18), partition, dtype=dtype, batch=1)
    tensors = tuple(x.requires_grad_() for x in inputs)
    operator = torch.ops.ripple_attention.tile_sums
    torch.library.opcheck(operator, (*tensors, partition.bounds, 0.5))


@pytest.mark.parametrize("partition", [logarithmic(31), Partition((0, 10, 30)), foveal()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tile_sums_error_is_within_twice_others_at_the_same_precision(partition, dtype):
    inputs = make_inputs((33, 40), partition, dtype=dtype, features=16, value_dim=8)
    exact = gradients(run("naive", partition), tuple(x.double() for x in inputs))

    def errors(implementation):
        out, grads = gradients(run(implementation, partition), inputs)
        pairs = zip((out, *grads), (exact[0], *exact[1]), strict=True)
        assert all(x.dtype == dtype for x in (out, *grads))
        return torch.tensor([relative_error(ours, reference) for ours, reference in pairs])

    known = errors("naive")
    if not partition.tile:  # by parts, sums of keys have signs, which the definition's have not
        known = torch.maximum(known, errors("table"))
    assert (errors("tile_sums") <= 2 * known + torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("group", range(6))
@pytest.mark.parametrize("partition", [Partition((1, 7, 15, 18, 30)), foveal(2, 4, 3)])
def test_queries_that_see_dead_keys_alone_give_zeros(partition, group):
    q, k, v, weights = make_inputs((40, 44), partition, dtype=torch.float32)
    groups = partition.groups((13, 20), (40, 44))
    k[:, groups == group] = 0  # not padded: features that happen to be zero
    weights.zero_()[..., group] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    blind = run("tile_sums", partition)(*leaves)[:, 13, 20]
    assert (blind == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(blind.sum(), leaves))


@pytest.mark.parametrize("reach", [15, 31, 60])
def test_memory_is_at_most_four_times_the_inputs_at_any_reach(reach):
    partition = Partition((0, 7, reach))
    inputs = make_inputs(
        (64, 64), partition, batch=1, heads=6, features=32, value_dim=32, dtype=torch.float32
    )
    leaves = tuple(x.requires_grad_() for x in inputs)
    with torch.profiler.profile(profile_memory=True) as profiler:
        torch.autograd.grad(run("tile_sums", partition)(*leaves).sum(), leaves)
    events = profiler.profiler.kineto_results.events()
    held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    assert max(held) <= 4 * sum(x.nbytes for x in inputs)  # the output and gradients among it


def test_coarse_rings_are_refused_where_only_boxes_are_known():
    partition = foveal()
    inputs = make_inputs((9, 9), partition)
    for implementation in ("tiled", "table"):
        with pytest.raises(ValueError, match="no coarse rings.*'tile_sums' or 'naive' can run"):
            run(implementation, partition)(*inputs)


def test_a_foveal_layer_compiles_without_a_graph_break():
    torch._dynamo.reset()
    layer = RippleAttention(24, 2, max_distance=3, partition="foveal", tile=4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 9, 21, 24), (1, 17, 30, 24)):
        x = torch.randn(shape)
        assert relative_error(compiled(x), layer(x)) < 1e-5


def test_a_foveal_layer_exports_for_every_batch_height_and_width():
    layer = RippleAttention(24, 2, max_distance=3, partition="foveal", tile=4).eval()
    free = dict.fromkeys(range(3), torch.export.Dim.AUTO)
    program = torch.export.export(layer, (torch.randn(3, 9, 21, 24),), dynamic_shapes=(free,))
    for shape in ((1, 5, 30, 24), (2, 17, 8, 24), (1, 40, 41, 24)):
        x = torch.randn(shape)
        assert relative_error(program.module()(x), layer(x)) < 1e-6
