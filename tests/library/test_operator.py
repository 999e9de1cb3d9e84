"""Every algorithm against the definition, and the definition against a loop a reader can check."""

from functools import partial

import pytest
import torch

from inputs import (
    GRIDS,
    MASKS,
    assert_sees_all_that_lives,
    gradients,
    make_inputs,
    make_mask,
    relative_error,
)
from ripple_attention import (
    Partition,
    chebyshev,
    dense,
    linear_attention,
    logarithmic,
    ripple_attention,
    ripple_softmax_attention,
)
from ripple_attention.ops import table, tile_sums, tiled

FAST = ["table", "tiled", "tile_sums"]
EPS = [0.0, 0.5]
PARTITIONS = [
    chebyshev(1),
    chebyshev(4),
    chebyshev(9),
    chebyshev(60),
    logarithmic(3),
    logarithmic(40),
]
PARTITIONS += [Partition((2,)), Partition((1, 5)), Partition((0, 8, 18))]


def run(implementation, partition, mask=None, eps=0.0):
    def function(q, k, v, weights):
        return ripple_attention(
            q, k, v, weights,
            partition=partition, key_padding_mask=mask, implementation=implementation, eps=eps,
        )  # fmt: skip

    return function


def loop(q, k, v, weights, partition, mask, eps):
    """Ripple attention one pair of tokens at a time."""
    B, H, W, N, _ = q.shape
    out = torch.zeros_like(v)
    for b in range(B):
        for n in range(N):
            for i in range(H * W):
                row, column = divmod(i, W)
                numerator, denominator = torch.zeros_like(v[0, 0, 0, 0]), 0.0
                for j in range(H * W):
                    key_row, key_column = divmod(j, W)
                    if mask is not None and mask[b, key_row, key_column]:
                        continue
                    distance = max(abs(row - key_row), abs(column - key_column))
                    group = sum(radius < distance for radius in partition.radii)
                    similarity = q[b, row, column, n] @ k[b, key_row, key_column, n]
                    pair = weights[b, row, column, n, group] * similarity
                    numerator = numerator + pair * v[b, key_row, key_column, n]
                    denominator = denominator + pair
                if denominator + eps != 0:
                    out[b, row, column, n] = numerator / (denominator + eps)
    return out


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (5, 4)])
@pytest.mark.parametrize("partition", [chebyshev(1), chebyshev(3), logarithmic(3), chebyshev(20)])
def test_naive_matches_a_loop_over_tokens(partition, grid, mask_kind, eps):
    inputs, mask = make_inputs(grid, partition), make_mask(mask_kind, grid)
    expected = loop(*inputs, partition, mask, eps)
    assert relative_error(run("naive", partition, mask, eps)(*inputs), expected) < 1e-13


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: f"radii{len(p.radii)}to{p.reach}")
@pytest.mark.parametrize("implementation", FAST)
def test_matches_naive_in_float64(implementation, partition, grid, mask_kind, eps):
    inputs, mask = make_inputs(grid, partition), make_mask(mask_kind, grid)
    expected = gradients(run("naive", partition, mask, eps), inputs)
    got = gradients(run(implementation, partition, mask, eps), inputs)
    for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert relative_error(ours, reference) <= 1e-10


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("partition", [chebyshev(4), chebyshev(60), logarithmic(9)])
def test_tiled_error_is_within_twice_naives_at_the_same_precision(partition, grid, dtype, eps):
    inputs = make_inputs(grid, partition, dtype=dtype, features=16, value_dim=8)
    exact = gradients(run("naive", partition, eps=eps), tuple(x.double() for x in inputs))
    naive = gradients(run("naive", partition, eps=eps), inputs)
    tiled = gradients(run("tiled", partition, eps=eps), inputs)
    rounding = torch.finfo(dtype).eps
    for ours, theirs, reference in zip(
        (tiled[0], *tiled[1]), (naive[0], *naive[1]), (exact[0], *exact[1]), strict=True
    ):
        assert ours.dtype == dtype
        assert relative_error(ours, reference) <= 2 * relative_error(theirs, reference) + rounding


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("grid", GRIDS[1:])  # a lone token's gradients are nothing but rounding
@pytest.mark.parametrize("partition", [chebyshev(4), chebyshev(60), logarithmic(9)])
def test_table_matches_naive_in_float32(partition, grid, eps):
    inputs = make_inputs(grid, partition, dtype=torch.float32, features=16, value_dim=8)
    exact = gradients(run("naive", partition, eps=eps), tuple(x.double() for x in inputs))
    naive = gradients(run("naive", partition, eps=eps), inputs)
    table = gradients(run("table", partition, eps=eps), inputs)
    for ours, theirs, reference in zip(
        (table[0], *table[1]), (naive[0], *naive[1]), (exact[0], *exact[1]), strict=True
    ):
        assert relative_error(ours, reference) <= 2 * relative_error(theirs, reference) + 1e-6


@pytest.mark.parametrize(
    ("implementation", "bound"), [("table", 3e-6), ("tiled", 3e-7), ("tile_sums", 3e-7)]
)
def test_local_weights_keep_their_digits_on_a_large_grid(implementation, bound):
    # A table of plain prefix sums is off by 1.5e-5 here: they grow with the grid, a cell does not.
    partition = chebyshev(4)
    inputs = make_inputs(
        (64, 64), partition, batch=1, heads=1, features=32, value_dim=32, dtype=torch.float32
    )
    local = torch.tensor([0.9, 0.09, 0.009, 0.0009, 0.0001]).expand_as(inputs[3])
    exact = run("tiled", partition)(*(x.double() for x in (*inputs[:3], local)))
    got = run(implementation, partition)(*inputs[:3], local)
    assert relative_error(got, exact) < bound


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("implementation", FAST)
def test_on_large_grids_queries_see_all_that_lives_and_no_more(implementation, group):
    assert_sees_all_that_lives(partial(run, implementation), group)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("partition", [chebyshev(2), logarithmic(2), chebyshev(9)])
@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_operator_passes_gradcheck(implementation, partition, eps):
    inputs = make_inputs((3, 4), partition, batch=1, features=3, value_dim=2)
    q, k, v, weights = (x.requires_grad_() for x in (inputs[0] + 0.1, inputs[1] + 0.1, *inputs[2:]))
    mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    mask[0, 1:, 3] = True
    assert torch.autograd.gradcheck(run(implementation, partition, mask, eps), (q, k, v, weights))


@pytest.mark.parametrize("eps", EPS)
def test_linear_attention_passes_gradcheck(eps):
    q, k, v, _ = (x.abs() + 0.1 for x in make_inputs((2, 3), chebyshev(1), batch=1))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, eps=eps), leaves)


@pytest.mark.parametrize("implementation", FAST)
def test_second_derivatives_are_refused_with_a_remedy(implementation):
    q, k, v, weights = make_inputs((3, 4), chebyshev(2))
    out = run(implementation, chebyshev(2))(q.requires_grad_(), k, v, weights)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{implementation}' has first.*use .*'naive'"):
        grad.sum().backward()


def test_ripple_softmax_passes_gradcheck():
    partition = chebyshev(2)
    inputs = tuple(x.requires_grad_() for x in make_inputs((2, 3), partition, batch=1))
    mask = torch.zeros(1, 2, 3, dtype=torch.bool)
    mask[0, 1, 2] = True
    assert torch.autograd.gradcheck(
        lambda *x: ripple_softmax_attention(*x, partition=partition, key_padding_mask=mask), inputs
    )


def test_ripple_softmax_is_softmax_with_the_bias_log_alpha():
    partition, (H, W) = chebyshev(3), (4, 5)
    q, k, v, weights = make_inputs((H, W), partition, features=6)
    mask = make_mask("random", (H, W))
    bias = weights.flatten(1, 2).transpose(1, 2).log()  # (B, N, L, G)
    groups = partition.pair_groups((H, W))
    bias = bias.gather(-1, groups.expand(2, 2, -1, -1))
    bias = bias.masked_fill(mask.flatten(1)[:, None, None], -torch.inf)
    heads_first = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=bias)
    got = ripple_softmax_attention(q, k, v, weights, partition=partition, key_padding_mask=mask)
    assert relative_error(got.flatten(1, 2).transpose(1, 2), expected) < 1e-12


def test_ripple_softmax_of_a_group_without_weight_does_not_see_it():
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((1, 5), partition)
    weights = torch.zeros_like(weights)
    weights[..., 0] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    out = ripple_softmax_attention(*leaves, partition=partition)
    torch.testing.assert_close(out, v)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), leaves))


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_a_zero_denominator_gives_zeros_forward_and_backward(implementation):
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((4, 5), partition)
    q[:, 1] = 0
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    out = run(implementation, partition)(*leaves)
    assert (out[:, 1] == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, 1] == 0).all() and (grads[3][:, 1] == 0).all()


@pytest.mark.parametrize("implementation", ["naive", *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_on_empty_groups_alone_gives_zeros(implementation, dtype):
    # Rings 3, 4 and the rest lie outside a 3×3 grid: rounding must not make something of nothing.
    partition = chebyshev(5)
    q, k, v, weights = make_inputs((3, 3), partition, dtype=dtype)
    weights = torch.zeros_like(weights)
    weights[..., 3:] = 1 / 3
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    out = run(implementation, partition)(*leaves)
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_a_rest_that_is_all_padding_gives_zeros(implementation):
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((9, 9), partition, dtype=torch.float32)
    mask = torch.ones(2, 9, 9, dtype=torch.bool)
    mask[:, 4, 4] = False
    weights = torch.zeros_like(weights)
    weights[..., -1] = 1
    out = run(implementation, partition, mask)(q, k, v, weights)
    assert (out[:, 3:6, 3:6] == 0).all()  # these have the only key within their boxes


def blind_inputs(partition, dtype):
    """Inputs whose queries in rows and columns 18 to 22 of 40 see dead keys alone."""
    q, k, v, weights = make_inputs((40, 40), partition, dtype=dtype)
    dead = torch.ones(40, 40, dtype=torch.bool)
    dead[19:22, 19:22] = False
    k[:, dead] = 0  # not padded: features that happen to be zero
    weights = torch.zeros_like(weights)
    weights[..., -1] = 1
    return tuple(x.requires_grad_() for x in (q, k, v, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_queries_that_see_dead_keys_alone_give_zeros(implementation, dtype):
    partition = chebyshev(4)
    leaves = blind_inputs(partition, dtype)
    blind = run(implementation, partition)(*leaves)[:, 18:23, 18:23]
    assert (blind == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(blind.sum(), leaves))


@pytest.mark.parametrize(("eps", "bound"), [(1e-9, 0.0), (0.5, 1e-5)])
@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_eps_does_not_blow_up_rounding(implementation, eps, bound):
    # What is left of a difference of sums may exceed a small eps a thousand times.
    partition = chebyshev(4)
    leaves = blind_inputs(partition, torch.float32)
    blind = run(implementation, partition, eps=eps)(*leaves)[:, 18:23, 18:23]
    assert blind.abs().max() <= bound
    grads = torch.autograd.grad(blind.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("implementation", ["linear", "naive", *FAST])
def test_a_query_whose_features_die_fades_out_only_with_eps(implementation):
    partition = chebyshev(2)
    q, *others = make_inputs((9, 30), partition)

    def faded(scale, eps):
        if implementation != "linear":
            return gradients(run(implementation, partition, eps=eps), (scale * q, *others))
        return gradients(lambda *x: linear_attention(*x, eps=eps), (scale * q, *others[:2]))

    alive, alive_grads = faded(1.0, 0.0)
    dying, dying_grads = faded(1e-10, 0.0)
    assert relative_error(dying, alive) < 1e-12
    assert dying_grads[0].norm() > 1e9 * alive_grads[0].norm()

    dying, dying_grads = faded(1e-10, 0.5)
    _, dead_grads = faded(0.0, 0.5)
    assert dying.norm() < 1e-6 * alive.norm()
    for ours, limit in zip(dying_grads, dead_grads, strict=True):
        assert limit.isfinite().all()
        assert relative_error(ours, limit) < 1e-6


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_small_denominators_have_finite_gradients(implementation):
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((5, 6), partition, dtype=torch.float32)
    tiny = (1e-12 * q, 1e-12 * k, v, weights)
    _, grads = gradients(run(implementation, partition), tiny)
    assert all(grad.isfinite().all() for grad in grads)
    if implementation == "naive":
        _, grads = gradients(linear_attention, tiny[:3])
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_queries_that_see_padding_alone_give_zeros(implementation):
    partition = chebyshev(3)
    q, k, v, weights = make_inputs((32, 32), partition, dtype=torch.float32)
    mask = torch.zeros(2, 32, 32, dtype=torch.bool)
    mask[:, 10:20, 10:20] = True
    weights[..., -1] = 0  # local only: the middle of the padding sees nothing
    out = run(implementation, partition, mask)(q, k, v, weights)
    assert (out[:, 12:18, 12:18] == 0).all()


@pytest.mark.parametrize("implementation", FAST)
def test_weight_spent_on_an_empty_ring_does_not_blur_the_rest(implementation):
    partition = chebyshev(8)
    inputs = make_inputs((3, 3), partition, dtype=torch.float32)
    inputs[3][:] = 1e-6 * inputs[3]
    inputs[3][..., 5] = 1  # no token of a 3×3 grid is 5 away
    exact = gradients(run("naive", partition), tuple(x.double() for x in inputs))
    got = gradients(run(implementation, partition), inputs)
    for ours, reference in zip((got[0], *got[1]), (exact[0], *exact[1]), strict=True):
        assert relative_error(ours, reference) < 1e-5


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_a_distance_beyond_the_grid_equals_the_dense_partition(implementation):
    grid = (5, 6)
    q, k, v, weights = make_inputs(grid, chebyshev(20))
    narrow = weights[..., :6]
    expected = run("naive", dense(grid))(q, k, v, narrow)
    assert relative_error(run(implementation, chebyshev(20))(q, k, v, weights), expected) < 1e-12


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_the_smallest_distance_weighs_self_against_all_others(implementation):
    partition = chebyshev(1)
    q, k, v, weights = make_inputs((3, 4), partition)
    everything = torch.einsum("bhwnm,bxynm,bxyne->bhwne", q, k, v)
    own = torch.einsum("bhwnm,bhwnm,bhwne->bhwne", q, k, v)
    norm = torch.einsum("bhwnm,bxynm->bhwn", q, k).unsqueeze(-1)
    own_norm = (q * k).sum(-1, keepdim=True)
    near, rest = weights[..., :1], weights[..., 1:]
    numerator = near * own + rest * (everything - own)
    denominator = near * own_norm + rest * (norm - own_norm)
    expected = torch.where(denominator > 0, numerator / denominator, 0)
    assert relative_error(run(implementation, partition)(q, k, v, weights), expected) < 1e-12


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_padded_tokens_are_ignored_even_when_they_are_not_numbers(implementation):
    partition, grid = chebyshev(2), (6, 5)
    q, k, v, weights = make_inputs(grid, partition)
    mask = make_mask("rows", grid)
    clean = gradients(run(implementation, partition, mask), (q, k, v, weights))
    k, v = k.clone(), v.clone()
    k[mask], v[mask] = torch.nan, torch.inf
    dirty = gradients(run(implementation, partition, mask), (q, k, v, weights))
    assert torch.equal(clean[0], dirty[0])
    assert all(torch.equal(a, b) for a, b in zip(clean[1], dirty[1], strict=True))
    assert (dirty[1][1][mask] == 0).all() and (dirty[1][2][mask] == 0).all()


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_padding_a_grid_changes_nothing_inside(implementation):
    partition = chebyshev(3)
    small = make_inputs((7, 5), partition)
    alone = run(implementation, partition)(*small)
    large = tuple(torch.full((2, 12, 11, *x.shape[3:]), 7.0, dtype=x.dtype) for x in small)
    for canvas, x in zip(large, small, strict=True):
        canvas[:, :7, :5] = x
    mask = torch.ones(2, 12, 11, dtype=torch.bool)
    mask[:, :7, :5] = False
    together = run(implementation, partition, mask)(*large)[:, :7, :5]
    assert relative_error(together, alone) < 1e-12


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_nan_stays_where_it_belongs(implementation):
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((9, 30), partition, batch=2)
    q[0, 2, 3, 1] = torch.nan  # one query of one head
    weights[0, 4, 4, 0] = torch.nan
    v[1, 0, 0, 0] = torch.nan  # a value that all of its head sees
    broken = run(implementation, partition)(q, k, v, weights).isnan().any(-1)
    expected = torch.zeros_like(broken)
    expected[0, 2, 3, 1] = expected[0, 4, 4, 0] = True
    expected[1, :, :, 0] = torch.einsum("hwm,xym->hw", q[1, :, :, 0], k[1, :, :, 0]) != 0
    assert torch.equal(broken, expected)


@pytest.mark.parametrize("implementation", ["auto", "naive", *FAST])
@pytest.mark.parametrize("shape", [(0, 4, 5, 2), (2, 0, 5, 2), (2, 4, 5, 0)])
def test_empty_batches_grids_and_heads_give_empty_results(implementation, shape):
    q, k = torch.rand(2, *shape, 6, requires_grad=True)
    v = torch.rand(*shape, 3, requires_grad=True)
    weights = torch.rand(*shape, 5, requires_grad=True)
    out = run(implementation, chebyshev(4))(q, k, v, weights)
    assert out.shape == v.shape
    out.sum().backward()
    assert v.grad.shape == v.shape


@pytest.mark.parametrize("implementation", ["naive", *FAST])
def test_strided_views_give_the_same_result(implementation):
    partition, grid = chebyshev(3), (5, 9)
    qkv = torch.rand(2, *grid, 3, 2, 6, dtype=torch.float64)
    q, k, v = qkv.unbind(3)
    weights = torch.rand(2, 2, *grid, 4, dtype=torch.float64).permute(0, 2, 3, 1, 4)
    assert not any(x.is_contiguous() for x in (q, k, v, weights))
    inputs = (q, k, v, weights)
    strided = run(implementation, partition)(*inputs)
    contiguous = run(implementation, partition)(*(x.contiguous() for x in inputs))
    assert torch.equal(strided, contiguous)


@pytest.mark.parametrize("implementation", FAST)
def test_expanded_weights_get_their_full_gradient(implementation):
    partition, grid = chebyshev(3), (4, 6)
    q, k, v, _ = make_inputs(grid, partition)
    row = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def gradient(name):
        out = run(name, partition)(q, k, v, row.expand(2, *grid, 2, 4))
        return torch.autograd.grad(out.square().sum(), row)[0]

    assert relative_error(gradient(implementation), gradient("naive")) < 1e-12


@pytest.mark.parametrize("grid", [(40, 9), (9, 40), (40, 33), (200, 1), (1, 200)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("implementation", FAST)
def test_one_image_of_any_shape_matches_naive(implementation, heads, grid):
    partition = chebyshev(3)
    inputs = make_inputs(grid, partition, batch=1, heads=heads)
    expected = gradients(run("naive", partition), inputs)
    got = gradients(run(implementation, partition), inputs)
    for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert relative_error(ours, reference) <= 1e-10


@pytest.mark.parametrize("budget", [1, 300, 10**9])
def test_the_size_of_the_parts_does_not_matter(budget, monkeypatch):
    partition, grid = chebyshev(4), (13, 29)
    inputs = make_inputs(grid, partition, batch=3)
    expected = gradients(run("naive", partition), inputs)
    monkeypatch.setattr(table, "NUMBERS_ON_CPU", budget)
    monkeypatch.setattr(tiled, "PAIRS_ON_CPU", budget)
    monkeypatch.setattr(tile_sums, "NUMBERS_ON_CPU", budget)
    for implementation in FAST:
        got = gradients(run(implementation, partition), inputs)
        for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
            assert relative_error(ours, reference) < 1e-12


def test_memory_kept_for_the_backward_pass_does_not_grow_with_the_distance():
    def kept(implementation, max_distance):
        partition = chebyshev(max_distance)
        inputs = tuple(x.requires_grad_() for x in make_inputs((14, 14), partition))
        bytes_kept = 0

        def count(tensor):
            nonlocal bytes_kept
            if tensor.data_ptr() != inputs[3].data_ptr():  # the weights are the caller's
                bytes_kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            run(implementation, partition)(*inputs)
        return bytes_kept

    for implementation in FAST:
        assert kept(implementation, 2) == kept(implementation, 6) > 0
