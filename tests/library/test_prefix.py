"""Tokens in front of the grid's, that have no place on it: class, register and text tokens."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from near_inputs import CASES, GRIDS, WAYS, compare, definition, make_near, masks, run
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from inputs import relative_error
from ripple_attention import (
    LinearAttention,
    RippleAttention,
    RippleHeads,
    SoftmaxAttention,
    chebyshev,
    ripple_attention,
)

ALL = ["naive", "tiled", "table"]
KINDS = ["features", "softmax"]


@pytest.mark.parametrize("mask_kind", ["none", "random", "image"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("implementation", "case"),
    [x for x in WAYS if x[1] not in ("one ring far", "two boxes", "wide")],
)
def test_beside_softmax_matches_the_definition(implementation, case, grid, mask_kind):
    partition, distance = CASES[case]
    mask, of_prefix = masks(mask_kind, grid, 3)
    inputs = make_near(grid, partition, 3)
    got = run(implementation, partition, distance, mask, of_prefix)
    expected = definition(partition, distance, mask, of_prefix)
    for name, (ours, theirs) in compare(got, expected, inputs).items():
        assert relative_error(ours, theirs) <= 1e-10, name


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("mask_kind", ["none", "random", "image"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("implementation", ALL)
def test_beside_features_matches_the_definition(implementation, grid, mask_kind, eps):
    partition = chebyshev(3)
    mask, of_prefix = masks(mask_kind, grid, 3)
    _, _, q, k, v, weights, _, _, prefix_v = make_near(grid, partition, 3)
    inputs = (q, k, v, weights, torch.rand(2, 3, 2, 5, dtype=torch.float64), prefix_v)

    def got(q, k, v, weights, prefix_k, prefix_v):
        return ripple_attention(
            q, k, v, weights, partition=partition, prefix_k=prefix_k, prefix_v=prefix_v,
            prefix_padding_mask=of_prefix, key_padding_mask=mask, implementation=implementation,
            eps=eps,
        )  # fmt: skip

    def expected(q, k, v, weights, prefix_k, prefix_v):
        shown = 1.0 if mask is None else (~mask)[..., None, None].double()
        first = 1.0 if mask is None else (~of_prefix)[..., None, None].double()
        rows = (x.flatten(1, 2).transpose(1, 2) for x in (q, k * shown, v, weights))
        q, k, v, weights = rows
        k = torch.cat([(prefix_k * first).transpose(1, 2), k], 2)
        values = torch.cat([prefix_v.transpose(1, 2), v], 2)
        groups = F.pad(partition.pair_groups(grid) + 1, (3, 0))  # prefix tokens are group 0
        pairs = weights.gather(-1, groups.expand(2, 2, -1, -1)) * (q @ k.mT)
        total = pairs.sum(-1, keepdim=True) + eps
        out = torch.where(total == 0, 0, pairs @ values / torch.where(total == 0, 1, total))
        return out.transpose(1, 2).unflatten(1, grid)

    for name, (ours, theirs) in compare(got, expected, inputs).items():
        assert relative_error(ours, theirs) <= 1e-10, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("implementation", ["auto", *ALL])
def test_uniform_weights_and_a_window_over_the_grid_are_softmax_over_all_tokens(
    implementation, grid, dtype, bound
):
    torch.manual_seed(0)
    made = {"implementation": implementation, "dtype": dtype, "num_prefix_tokens": 2}
    heads = RippleHeads(6, 2, max_distance=40, near="softmax", halt_threshold=0.0, **made)
    nn.init.zeros_(heads.spatial_weights.embedding)
    q, k, v = torch.randn(3, 2, 2 + grid[0] * grid[1], 2, 6, dtype=dtype).unbind(0)

    def expected(q, k, v):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows).transpose(1, 2)

    got = lambda q, k, v: heads(q, k, v, grid_size=grid)
    for name, (ours, theirs) in compare(got, expected, (q, k, v)).items():
        assert relative_error(ours, theirs) <= bound, name


@pytest.mark.parametrize("near", KINDS)
def test_their_own_outputs_see_all_tokens_alike(near):
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near=near, num_prefix_tokens=3)
    parent = LinearAttention(12, 2) if near == "features" else SoftmaxAttention(12, 2)
    parent.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 3 + 35, 12)
    mask = torch.rand(2, 38) < 0.3
    for given in (None, mask):
        ours = layer(x, grid_size=(7, 5), key_padding_mask=given)
        theirs = parent(x, key_padding_mask=given)
        assert relative_error(ours[:, :3], theirs[:, :3]) < 1e-6


@pytest.mark.parametrize("near", KINDS)
def test_what_stands_in_the_padding_stays_there(near):
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near=near, num_prefix_tokens=3)
    x, of_grid = torch.randn(2, 38, 12), torch.rand(2, 7, 5) < 0.4
    mask = torch.cat([torch.tensor([[False, False, True]] * 2), of_grid.flatten(1)], 1)
    expected = layer(x, grid_size=(7, 5), key_padding_mask=mask)
    out = layer(x.masked_fill(mask[..., None], torch.nan), grid_size=(7, 5), key_padding_mask=mask)
    assert torch.equal(out[~mask], expected[~mask])
    shapes = [of_grid, of_grid.flatten(1), F.pad(of_grid.flatten(1), (3, 0))]
    first, *others = (layer(x, grid_size=(7, 5), key_padding_mask=given) for given in shapes)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("near", KINDS)
def test_padding_alone_stays_finite(near):
    layer = RippleAttention(12, 2, near=near, num_prefix_tokens=1)
    mask = torch.ones(2, 36, dtype=torch.bool)
    out = layer(torch.randn(2, 36, 12), grid_size=(7, 5), key_padding_mask=mask)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("near", KINDS)
def test_a_random_map_draws_once_for_all_tokens(near):
    torch.manual_seed(0)
    layer = RippleAttention(12, 2, near=near, num_prefix_tokens=1, feature_map="performer")
    drawn = []
    layer.feature_map.sample, sample = (
        (lambda: drawn.append(1) or sample()),
        layer.feature_map.sample,
    )
    layer(torch.randn(2, 36, 12), grid_size=(7, 5))
    assert len(drawn) == 1


@pytest.mark.parametrize("near", KINDS)
def test_derivatives_that_custom_operators_lack_are_taken_by_the_definition(near):
    torch.manual_seed(0)
    layer = RippleAttention(8, 2, near=near, num_prefix_tokens=2, implementation="naive").double()
    x, tangent = torch.randn(2, 1, 2 + 20, 8, dtype=torch.float64).unbind(0)
    run = lambda x: layer(x, grid_size=(4, 5))
    numeric = (run(x + 1e-6 * tangent) - run(x - 1e-6 * tangent)) / 2e-6
    for implementation in ("naive", "auto"):
        layer.implementation = implementation
        _, got = torch.func.jvp(run, (x,), (tangent,))
        assert relative_error(got, numeric) < 1e-7


@pytest.mark.parametrize("implementation", ALL)
def test_gradcheck_beside_features(implementation):
    partition = chebyshev(2)
    _, _, q, k, v, weights, _, _, prefix_v = (
        x[:1] for x in make_near((2, 3), partition, 2, heads=1, width=2, features=2)
    )
    prefix_k = torch.rand_like(prefix_v[..., :2])

    def function(q, k, v, weights, prefix_k, prefix_v):
        return ripple_attention(
            q, k, v, weights, partition=partition, prefix_k=prefix_k, prefix_v=prefix_v,
            implementation=implementation, eps=0.5,
        )  # fmt: skip

    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v, weights, prefix_k, prefix_v))
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("near", KINDS)
def test_autocast_sums_in_float32(near):
    layer, x = RippleAttention(12, 2, near=near, num_prefix_tokens=2), torch.randn(2, 2 + 35, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, grid_size=(7, 5))
    assert out.dtype == torch.bfloat16
    assert relative_error(out, layer(x, grid_size=(7, 5))) < 0.02


@pytest.mark.parametrize("implementation", ["naive", "tiled"])
@pytest.mark.parametrize("near", KINDS)
def test_gradients_repeat_bit_for_bit_and_pass_through_ddp_and_checkpoints(near, implementation):
    layer = RippleAttention(
        12, 2, near=near, num_prefix_tokens=2, implementation=implementation, max_distance=2
    )
    x, options = torch.randn(2, 2 + 20, 12), {"grid_size": (4, 5)}

    def gradients(run):
        layer.zero_grad()
        run(x, **options).square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    expected = gradients(layer)
    found = [gradients(layer), gradients(partial(checkpoint, layer, use_reentrant=False))]
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found.append(gradients(nn.parallel.DistributedDataParallel(layer)))
    finally:
        distributed.destroy_process_group()
    for grads in found:
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


class Model(nn.Module):
    """Takes tokens on a grid, so that batch, height and width can be free."""

    def __init__(self, near):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(2, 12))
        self.attention = RippleAttention(12, 2, near=near, num_prefix_tokens=2)

    def forward(self, x, mask):
        tokens = torch.cat([self.first.expand(x.shape[0], -1, -1), x.flatten(1, 2)], 1)
        return self.attention(tokens, grid_size=(x.shape[1], x.shape[2]), key_padding_mask=mask)


SHAPES = [(1, 5, 30), (2, 17, 8), (3, 9, 21)]
AUTO = dict.fromkeys(range(3), torch.export.Dim.AUTO)


def example(shape):
    return torch.randn(*shape, 12), torch.rand(shape) < 0.2


@pytest.mark.parametrize("near", KINDS)
def test_exports_for_every_batch_height_and_width(near):
    model = Model(near).eval()
    program = torch.export.export(model, example((2, 9, 11)), dynamic_shapes=(AUTO, AUTO))
    assert "ripple_attention::" not in re.sub(r"#.*", "", str(program.graph))  # plain operations
    for shape in SHAPES:
        given = example(shape)
        assert relative_error(program.module()(*given), model(*given)) < 1e-6


@pytest.mark.parametrize("near", [pytest.param("features", marks=pytest.mark.slow), "softmax"])
def test_exports_to_onnx_for_every_batch_height_and_width(near, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, path = Model(near).eval(), tmp_path / "model.onnx"
    torch.onnx.export(
        model, example((2, 9, 11)), path, dynamo=True, verbose=False, input_names=["x", "mask"],
        dynamic_shapes=(AUTO, AUTO),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in SHAPES:
        x, mask = example(shape)
        (got,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert relative_error(torch.from_numpy(got), model(x, mask)) < 1e-5


@pytest.mark.parametrize("near", KINDS)
def test_compiles_as_one_graph(near):
    torch._dynamo.reset()
    model, given = Model(near), example((2, 7, 5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(*given), model(*given)) < 1e-6
    compiled(*given).sum().backward()


def test_layers_refuse_with_the_rule_and_what_came():
    layer = RippleAttention(12, 2, num_prefix_tokens=2)
    for x, options, message in (
        (torch.randn(2, 7, 5, 12), {}, r"tokens in a row \(B, 2 \+ H·W, 12\)"),
        (torch.randn(2, 37, 12), {}, "needs to know where tokens lie"),
        (torch.randn(2, 35, 12), {"grid_size": (7, 5)}, r"2 \+ H·W = L; got"),
        (
            torch.randn(2, 37, 12),
            {"grid_size": (7, 5), "key_padding_mask": torch.zeros(2, 36).bool()},
            r"must be bool.*\(2, 7, 5\), \(2, 35\), \(2, 37\); got torch.bool, \(2, 36\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, **options)
    heads = RippleHeads(6, 2, num_prefix_tokens=2)
    with pytest.raises(
        ValueError, match=r"tokens in a row .* P=2, N=2, D=6, .*got grid_size=\(7, 5"
    ):
        heads(*torch.randn(3, 2, 35, 2, 6), grid_size=(7, 5))


def test_the_operator_refuses_with_the_rule_and_what_came():
    partition = chebyshev(3)
    _, _, q, k, v, weights, _, prefix_k, prefix_v = make_near((4, 5), partition, 3)
    good = {"partition": partition, "prefix_k": prefix_k[..., :5], "prefix_v": prefix_v}
    for change, message in (
        ({"prefix_k": None}, "prefix_k and prefix_v come together"),
        ({"prefix_v": prefix_v[:1]}, "come together"),
        (
            {"prefix_k": prefix_k},
            r"prefix_k must have the batch, heads, width.*\(2, 3, 2, 6\).*beside.* 5\)",
        ),
        ({"prefix_v": prefix_v[..., :2]}, r"prefix_v must have the batch, heads, width.*, 2\)"),
        ({"prefix_padding_mask": torch.zeros(2, 3)}, r"must be bool \(B, P\) = \(2, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ripple_attention(q, k, v, weights, **(good | change))
    with pytest.raises(ValueError, match="after one for prefix tokens"):
        ripple_attention(q, k, v, weights[..., 1:], **good)
