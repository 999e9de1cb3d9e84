"""Near by softmax, far by features: every path against the definition, and what follows from it."""

import pytest
import torch
import torch.nn.functional as F
from near_inputs import CASES, GRIDS, WAYS, compare, definition, make_near, masks, run

from inputs import relative_error
from ripple_attention import (
    NearSoftmax,
    Partition,
    RippleAttention,
    RippleHeads,
    SoftmaxAttention,
    chebyshev,
    ripple_attention,
)

ALL = ["naive", "tiled", "table"]


@pytest.mark.parametrize("mask_kind", ["none", "random", "image"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("implementation", "case"), WAYS)
def test_matches_the_definition_in_float64(implementation, case, grid, mask_kind):
    partition, distance = CASES[case]
    mask, _ = masks(mask_kind, grid, 0)
    inputs = make_near(grid, partition)
    got = run(implementation, partition, distance, mask)
    for name, (ours, theirs) in compare(got, definition(partition, distance, mask), inputs).items():
        assert relative_error(ours, theirs) <= 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [(7, 5), (33, 20)])
def test_tiled_error_is_within_twice_naives_at_the_same_precision(grid, dtype):
    partition = chebyshev(4)
    inputs = make_near(grid, partition, dtype=dtype)
    exact = tuple(x.double() for x in inputs)
    naive = compare(run("naive", partition), definition(partition), inputs, exact)
    tiled = compare(run("tiled", partition), definition(partition), inputs, exact)
    for name, (ours, reference) in tiled.items():
        allowed = 2 * relative_error(naive[name][0], reference) + torch.finfo(dtype).eps
        assert relative_error(ours, reference) <= allowed, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("implementation", ALL)
def test_uniform_weights_and_a_window_over_the_grid_are_softmax_attention(
    implementation, grid, dtype, bound
):
    partition = chebyshev(40)
    q, k, *features, v, weights, scale = make_near(grid, partition, dtype=dtype)
    weights = torch.full_like(weights, 1 / partition.num_groups)

    def expected(q, k, v):
        rows = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows).transpose(1, 2).unflatten(1, grid)

    got = lambda q, k, v: run(implementation, partition)(q, k, *features, v, weights, scale)
    for name, (ours, theirs) in compare(got, expected, (q, k, v)).items():
        assert relative_error(ours, theirs) <= bound, name


@pytest.mark.parametrize("implementation", ALL)
def test_a_rest_that_weighs_nothing_leaves_windowed_softmax(implementation):
    partition, grid = chebyshev(3), (7, 5)
    q, k, phi_q, phi_k, v, weights, scale = make_near(grid, partition)
    weights = torch.ones_like(weights)
    weights[..., -1] = 0
    out = run(implementation, partition)(q, k, phi_q, phi_k, v, weights, scale)
    seen = partition.pair_groups(grid) < 3
    rows = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*rows, seen).transpose(1, 2).unflatten(1, grid)
    assert relative_error(out, expected) <= 1e-12


@pytest.mark.parametrize("implementation", ALL)
def test_dead_features_leave_the_window_alone_and_get_no_gradient(implementation):
    partition = chebyshev(2)
    inputs = list(make_near((7, 5), partition))
    inputs[2] = torch.zeros_like(inputs[2])
    inputs[6] = inputs[6] + 1e4
    found = compare(run(implementation, partition), definition(partition), tuple(inputs))
    assert relative_error(*found["out"]) <= 1e-12
    assert (found["phi_q"][0] == 0).all() and (found["phi_k"][0] == 0).all()
    assert all(ours.isfinite().all() for ours, _ in found.values())


@pytest.mark.parametrize("shift", [-1e4, 1e4])
@pytest.mark.parametrize("implementation", ALL)
def test_large_scores_overflow_nowhere(implementation, shift):
    partition = chebyshev(3)
    q, k, *others, scale = make_near((7, 5), partition, dtype=torch.float32)
    q, k = (F.pad(x, (0, 1)) for x in (q, k))  # a channel that adds `shift` to all scores
    q[..., -1], k[..., -1] = shift / 100, 100 * 7**0.5
    q[0, 0] = q[0, 0] * 30
    for log_c in (scale, scale + shift):
        inputs = (q, k, *others, log_c)
        found = compare(
            run(implementation, partition),
            definition(partition),
            inputs,
            tuple(x.double() for x in inputs),
        )
        assert all(ours.isfinite().all() for ours, _ in found.values())
        assert (
            relative_error(*found["out"]) < 3e-3
        )  # scores of 10⁴ have three digits after the point


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "phi_q", "phi_k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("implementation", ALL)
def test_what_is_not_finite_does_not_become_finite(implementation, value, place):
    partition = chebyshev(2)
    inputs = make_near((7, 5), partition, dtype=torch.float32)
    inputs[place][0, 3, 2, 0, 0] = value
    out = run(implementation, partition)(*inputs)
    assert not out[0, 3, 2, 0].isfinite().all()


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("implementation", ALL)
def test_gradcheck(implementation, prefix):
    partition = Partition((0, 1))
    inputs = make_near((2, 4), partition, prefix, heads=1, width=2, features=2)
    leaves = tuple(x[:1].clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(run(implementation, partition, 0), leaves)
    if implementation == "naive":
        assert torch.autograd.gradgradcheck(run("naive", partition), leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(dtype):
    partition = chebyshev(3)
    q, k, phi_q, phi_k, v, weights, scale = (
        x[:1].clone().requires_grad_() for x in make_near((3, 4), partition, dtype=dtype)
    )
    mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    ops, radii = torch.ops.ripple_attention, list(partition.radii)
    for given in (None, mask):
        torch.library.opcheck(ops.near_window, (q, k, v, weights[..., :3], given, radii, 0.5))
    share = torch.rand_like(v, dtype=scale.dtype), torch.rand_like(scale)
    share = tuple(x.detach().requires_grad_() for x in share)
    for name in ("tiled", "table"):
        op = getattr(ops, f"{name}_shared")
        torch.library.opcheck(op, (phi_q, phi_k, v, weights, *share, radii, 0.5))


def test_features_alone_are_what_they_were():
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near="features")
    assert not any("far_scale" in name for name, _ in layer.named_parameters())
    x = torch.randn(2, 5, 6, 12)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 6)).unbind(3)
    phi_q, phi_k = layer.feature_map(q, k)
    weights = layer.spatial_weights(v)
    out = ripple_attention(phi_q, phi_k, v, weights, partition=layer.partition, eps=1.0)
    assert torch.equal(layer(x), layer.proj(out.flatten(3)))


def test_a_layer_with_the_weights_of_a_softmax_layer_gives_its_outputs():
    torch.manual_seed(0)
    softmax = SoftmaxAttention(12, 2)
    layer = RippleAttention(12, 2, max_distance=40, near="softmax", weights="fixed")
    missing, unknown = layer.load_state_dict(softmax.state_dict(), strict=False)
    layer.spatial_weights.weights.fill_(1 / 41)
    assert not unknown and all(name.split(".")[0] not in ("qkv", "proj") for name in missing)
    x = torch.randn(2, 7, 5, 12)
    mask = torch.rand(2, 7, 5) < 0.3
    for given in (None, mask):
        ours, theirs = (one(x, key_padding_mask=given) for one in (layer, softmax))
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("near", ["features", "softmax"])
def test_heads_compute_what_the_layer_does_between_its_projections(near):
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near=near)
    heads = RippleHeads(6, 2, near=near)
    heads.load_state_dict(
        {n: p for n, p in layer.state_dict().items() if n[:4] not in ("qkv.", "proj")}
    )
    x = torch.randn(2, 35, 12)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 6)).unbind(2)
    out = layer.proj(heads(q, k, v, grid_size=(7, 5)).flatten(2))
    assert torch.equal(layer(x, grid_size=(7, 5)), out)


def test_every_parameter_of_a_layer_gets_a_gradient_on_any_grid():
    for grid in GRIDS:
        layer = RippleAttention(12, 2, near="softmax")
        layer(torch.randn(1, *grid, 12)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_compiles_as_one_graph():
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near="softmax", near_distance=2)
    x = torch.randn(2, 7, 5, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), layer(x)) < 1e-6
    compiled(x).sum().backward()


def test_autocast_sums_in_float32():
    layer = RippleAttention(12, 2, near="softmax")
    x = torch.randn(2, 7, 5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, layer(x)) < 0.02


BAD = {
    "a distance between radii": ({"near": "softmax", "near_distance": 9}, "radii of the partition"),
    "a distance without softmax": ({"near_distance": 2}, 'how far near="softmax" goes'),
    "an unknown kernel": ({"near": "exp"}, "near must be one of features, softmax; got 'exp'"),
    "prefix tokens that are no number": ({"num_prefix_tokens": -1}, "whole number ≥ 0; got"),
}


@pytest.mark.parametrize("case", BAD)
def test_layers_refuse_with_the_rule_and_what_came(case):
    options, message = BAD[case]
    for make in (lambda: RippleAttention(12, 2, **options), lambda: RippleHeads(6, 2, **options)):
        with pytest.raises(ValueError, match=message):
            make()


def test_the_operator_refuses_with_the_rule_and_what_came():
    partition = chebyshev(3)
    q, k, phi_q, phi_k, v, weights, scale = make_near((4, 5), partition)
    for near, message in {
        NearSoftmax(q, k, scale, 7): "one of the partition's radii .*got 7",
        NearSoftmax(q, k, scale[0]): r"far_scale must be log c \(B, H, W, N\)",
        NearSoftmax(q, k[:, :2], scale): "same shape",
    }.items():
        with pytest.raises(ValueError, match=message):
            ripple_attention(phi_q, phi_k, v, weights, partition=partition, near=near)


def test_explain_says_which_parts_run(capsys):
    layer = RippleAttention(12, 2, near="softmax")
    assert layer.explain(torch.randn(1, 8, 8, 12)) == "tiled"
    assert "softmax" in capsys.readouterr().out
