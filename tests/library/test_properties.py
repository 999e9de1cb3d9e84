"""Properties that hold for any partition, grid and weights, searched by hypothesis."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inputs import make_inputs, relative_error
from ripple_attention import (
    Partition,
    chebyshev,
    halt,
    halt_group,
    linear_attention,
    logarithmic,
    ripple_attention,
    stick_breaking,
)

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("steady")

GRIDS = st.tuples(st.integers(1, 12), st.integers(1, 12))
PARTITIONS = st.one_of(
    st.integers(1, 15).map(chebyshev),
    st.integers(1, 15).map(logarithmic),
    st.sets(st.integers(0, 15), min_size=1).map(sorted).map(Partition),
)
EPS = st.sampled_from([0.0, 0.5])
IMPLEMENTATIONS = st.sampled_from(["naive", "table", "tiled"])
SEEDS = st.integers(0, 2**31)
LOGITS = st.lists(st.floats(-100, 100), min_size=1, max_size=12).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@given(PARTITIONS, GRIDS, st.data())
def test_groups_cover_the_grid_once(partition, grid, data):
    row = data.draw(st.integers(0, grid[0] - 1))
    column = data.draw(st.integers(0, grid[1] - 1))
    groups = partition.groups((row, column), grid)
    assert groups.shape == grid
    assert groups.min() >= 0 and groups.max() < partition.num_groups
    for group, radius in enumerate(partition.radii):  # boxes are exactly the groups up to theirs
        rows = slice(max(0, row - radius), row + radius + 1)
        columns = slice(max(0, column - radius), column + radius + 1)
        box = torch.zeros(grid, dtype=torch.bool)
        box[rows, columns] = True
        assert torch.equal(groups <= group, box)


@given(PARTITIONS, GRIDS, IMPLEMENTATIONS, SEEDS, EPS)
def test_uniform_weights_equal_linear_attention(partition, grid, implementation, seed, eps):
    q, k, v, weights = make_inputs(grid, partition, seed=seed)
    uniform = torch.full_like(weights, 1 / partition.num_groups)
    got = ripple_attention(
        q, k, v, uniform, partition=partition, implementation=implementation, eps=eps
    )
    expected = linear_attention(q, k, v, eps=eps * partition.num_groups)
    assert relative_error(got, expected) < 1e-10


@given(PARTITIONS, GRIDS, IMPLEMENTATIONS, SEEDS)
def test_permuting_heads_permutes_outputs(partition, grid, implementation, seed):
    inputs = make_inputs(grid, partition, heads=3, seed=seed)
    order = torch.tensor([2, 0, 1])
    run = lambda *x: ripple_attention(*x, partition=partition, implementation=implementation)
    permuted = run(*(x[:, :, :, order] for x in inputs))
    assert relative_error(permuted, run(*inputs)[:, :, :, order]) < 1e-12


@given(PARTITIONS, IMPLEMENTATIONS, st.integers(0, 4), st.integers(0, 4), SEEDS)
def test_shifting_an_image_in_a_zero_border_shifts_the_output(
    partition, implementation, down, across, seed
):
    size = 4
    image = make_inputs((size, size), partition, batch=1, seed=seed)

    def on_canvas(row, column):
        canvas = [torch.zeros(1, 12, 12, *x.shape[3:], dtype=x.dtype) for x in image]
        for target, x in zip(canvas, image, strict=True):
            target[:, row : row + size, column : column + size] = x
        out = ripple_attention(*canvas, partition=partition, implementation=implementation)
        return out[:, row : row + size, column : column + size]

    assert relative_error(on_canvas(4 + down, 4 + across), on_canvas(4, 4)) < 1e-10


@given(PARTITIONS, GRIDS, SEEDS)
def test_outputs_are_means_of_the_values(partition, grid, seed):
    q, k, v, weights = make_inputs(grid, partition, seed=seed)
    ones = torch.ones_like(v)
    out = ripple_attention(q, k, ones, weights, partition=partition)
    seen = out != 0
    torch.testing.assert_close(out[seen], ones[seen])


@given(PARTITIONS, GRIDS, IMPLEMENTATIONS, SEEDS, st.floats(0.01, 100))
def test_eps_shrinks_an_output_to_a_fraction_of_the_mean(
    partition, grid, implementation, seed, eps
):
    q, k, v, weights = make_inputs(grid, partition, seed=seed)
    run = lambda values, eps: ripple_attention(
        q, k, values, weights, partition=partition, implementation=implementation, eps=eps
    )
    mean, fraction = run(v, 0.0), run(torch.ones_like(v), eps)
    assert (fraction >= 0).all() and (fraction < 1).all()
    assert relative_error(run(v, eps), fraction * mean) < 1e-10


@given(LOGITS, st.booleans())
def test_weights_add_up_to_one_for_any_logits(logits, balanced):
    weights = stick_breaking(logits, balanced)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(), torch.ones((), dtype=torch.float64))


@given(LOGITS, st.booleans())
def test_halting_with_a_zero_threshold_changes_nothing(logits, balanced):
    weights = stick_breaking(logits, balanced)
    for tail in ("share", "printed"):
        assert torch.equal(halt(weights, 0.0, tail), weights)
        assert torch.equal(halt(weights.float(), 0.0, tail), weights.float())


@given(LOGITS, st.floats(0, 1))
def test_halting_keeps_the_sum_and_merges_less_than_the_threshold(logits, threshold):
    weights = stick_breaking(logits)
    halted = halt(weights, threshold)
    at = int(halt_group(weights, threshold))
    rounding = len(weights) * torch.finfo(torch.float64).eps
    torch.testing.assert_close(halted.sum(), weights.sum())
    assert torch.equal(halted[:at], weights[:at])
    if at < len(weights):
        assert weights[at:].sum() < threshold + rounding
        assert (halted[at:] == halted[at]).all()
    if at > 0:
        assert weights[at - 1 :].sum() >= threshold - rounding
