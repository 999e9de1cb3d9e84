import copy
import math

import pytest
import torch
import torch.nn.functional as F

from inputs import assert_padding_alone_stays_finite, assert_padding_is_ignored, relative_error
from ripple_attention import LinearAttention, linear_attention
from ripple_attention.models.encodings import (
    ConvSPELinearAttention,
    PermutedLinearAttention,
    RotaryLinearAttention,
    RotaryRippleAttention,
    SineSPELinearAttention,
    rotate,
    seeded_normal,
)
from ripple_attention.models.vit import GridVisionTransformer

STOCHASTIC = [SineSPELinearAttention, ConvSPELinearAttention]
LAYERS = [RotaryLinearAttention, PermutedLinearAttention, *STOCHASTIC]


def make(kind, **options):
    torch.manual_seed(0)
    if kind in STOCHASTIC:
        options = {"num_realizations": 8} | options
    return kind(24, num_heads=2, num_features=8, **options).double().eval()


def randn(*shape, seed=3):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def x():
    return randn(2, 5, 7, 24)


def similarities(encode, query, key, grid):
    """encode(query)·encode(key) for one content everywhere: (H·W queries, H·W keys, N)."""
    queries, keys = (encode(u.expand(1, *grid, *u.shape))[0].flatten(0, 1) for u in (query, key))
    return torch.einsum("inm,jnm->ijn", queries, keys)


def by_offset(products, grid):
    """Groups pairs of tokens by their offset (Δrow, Δcolumn)."""
    groups = {}
    for i in range(products.shape[0]):
        for j in range(products.shape[1]):
            offset = (j // grid[1] - i // grid[1], j % grid[1] - i % grid[1])
            groups.setdefault(offset, []).append(products[i, j])
    return {offset: torch.stack(group) for offset, group in groups.items()}


def encoder(kind):
    return rotate if kind is RotaryLinearAttention else make(kind).permute


# What all layers have in common


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (9, 4), (20, 17)])
def test_any_grid_gives_finite_gradients(kind, grid):
    layer = make(kind).train()
    x = randn(2, *grid, 24).requires_grad_()
    out = layer(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_pass_gradcheck(kind):
    torch.manual_seed(0)
    options = {"num_realizations": 4} if kind in STOCHASTIC else {}
    layer = kind(8, num_heads=2, feature_map="elu", **options).double().eval()
    value = randn(1, 2, 3, 8, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(layer, (randn(1, 2, 3, 8).requires_grad_(), value))


@pytest.mark.parametrize("kind", LAYERS)
def test_values_may_have_their_own_width(kind):
    layer = make(kind)
    q, k, v = randn(2, 5, 7, 2, 12), randn(2, 5, 7, 2, 12, seed=4), randn(2, 5, 7, 2, 3, seed=5)
    assert layer.attend(q, k, v, None).shape == v.shape


@pytest.mark.parametrize("kind", LAYERS)
def test_padded_tokens_do_not_matter(kind, x):
    layer = make(kind)
    mask = assert_padding_is_ignored(layer, x)
    before = layer(x, key_padding_mask=mask)[~mask]
    assert relative_error(layer(x)[~mask], before) > 1e-4


@pytest.mark.parametrize("kind", [RotaryLinearAttention, PermutedLinearAttention])
def test_rows_of_padding_are_as_a_smaller_grid(kind, x):
    layer = make(kind)
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[:, :3, :4] = False
    padded = layer(x, key_padding_mask=mask)[:, :3, :4]
    assert relative_error(padded, layer(x[:, :3, :4])) < 1e-12


@pytest.mark.parametrize("kind", LAYERS)
def test_an_image_of_padding_alone_stays_finite(kind, x):
    assert_padding_alone_stays_finite(make(kind), x)


@pytest.mark.parametrize("kind", LAYERS)
def test_position_matters(kind):
    x = randn(1, 1, 1, 24).expand(1, 4, 4, 24).clone()
    x[0, 0, 0] += 1  # all tokens alike but one, which is near to some and far from others
    position = make(kind)(x)[0, 1:, 1:].flatten(0, 1)
    none = make(LinearAttention)(x)[0, 1:, 1:].flatten(0, 1)
    assert (none - none[0]).abs().max() < 1e-12
    assert (position - position[0]).abs().max() > 1e-6


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_compile_without_a_graph_break(kind, x):
    torch.compiler.reset()
    layer = make(kind)
    # One with autograd's graph, too, which takes longest: that with the most kinds of operation.
    backend = "aot_eager" if kind is ConvSPELinearAttention else "eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for height in (5, 4, 3):
        part = x[:, :height]
        assert relative_error(compiled(part), layer(part)) < 1e-12
    compiled.train()
    assert compiled(x).isfinite().all()


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_copy_and_reload(kind, x):
    layer = make(kind)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    fresh = make(kind)
    torch.nn.init.normal_(fresh.proj.weight)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_run_in_half_precision_and_under_autocast(kind, x):
    expected = make(kind)(x)
    out = make(kind).bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16 and relative_error(out, expected) < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(make(kind).float()(x.float()), expected) < 0.05


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_run_on_meta_tensors(kind):
    with torch.device("meta"):
        layer = kind(24, num_heads=2, num_features=8).eval()
        assert layer(torch.empty(2, 5, 7, 24)).shape == (2, 5, 7, 24)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (RotaryLinearAttention, 0),
        (PermutedLinearAttention, 0),
        (SineSPELinearAttention, 71_424),  # 5.76 M → 5.83 to 5.84 M, as reported 5.84 M
        (ConvSPELinearAttention, 923_904),  # 5.76 M → 6.68 to 6.69 M, as reported 6.69 M
    ],
)
def test_parameters_in_twelve_layers_of_a_tiny_transformer(kind, extra):
    count = [sum(p.numel() for p in k(192, 6).parameters()) for k in (kind, LinearAttention)]
    assert 12 * (count[0] - count[1]) == extra


@pytest.mark.parametrize("kind", [RotaryLinearAttention, PermutedLinearAttention])
def test_products_depend_on_the_offset_only(kind):
    grid, query, key = (6, 5), randn(2, 8), randn(2, 8, seed=4)
    products = by_offset(similarities(encoder(kind), query, key, grid), grid)
    assert len(products) == 11 * 9
    for group in products.values():
        assert (group - group[0]).abs().max() < 1e-12
    torch.testing.assert_close(products[0, 0][0], (query * key).sum(-1))
    for offset in [(0, 1), (1, 0), (-1, 0), (2, 3)]:
        assert (products[offset][0] - products[0, 0][0]).abs().max() > 1e-3
    assert (products[2, 1][0] - products[1, 2][0]).abs().max() > 1e-3


# Rotary positions


def test_rotation_turns_one_half_by_row_and_one_by_column():
    x = randn(1, 1, 1, 1, 8).expand(1, 5, 7, 1, 8)
    by_row, by_column = rotate(x)[0, :, :, 0].split(4, -1)
    torch.testing.assert_close(by_row, by_row[:, :1].expand_as(by_row))
    torch.testing.assert_close(by_column, by_column[:1].expand_as(by_column))
    first = torch.view_as_complex(by_column[0].unflatten(-1, (2, 2)).contiguous())
    turns = torch.exp(1j * torch.arange(7)[:, None] * torch.tensor([1.0, 100**-0.5]).double())
    torch.testing.assert_close(first, first[:1] * turns)


def test_rotation_is_in_the_numerator_only(x):
    layer = make(RotaryLinearAttention, eps=0.5)
    q, k, v = randn(2, 5, 7, 2, 12), randn(2, 5, 7, 2, 12, seed=4), randn(2, 5, 7, 2, 3, seed=5)
    phi_q, phi_k = layer.feature_map(q, k)
    flat = [u.flatten(1, 2) for u in (rotate(phi_q), rotate(phi_k), phi_q, phi_k, v)]
    numerator = torch.einsum("binm,bjnm,bjne->bine", flat[0], flat[1], flat[4])
    denominator = torch.einsum("binm,bjnm->bin", flat[2], flat[3]).unsqueeze(-1)
    expected = (numerator / (denominator + 0.5)).view(v.shape)
    assert relative_error(layer.attend(q, k, v, None), expected) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("prefix", [0, 2])
def test_rotary_ripples_over_the_whole_grid_are_softmax_attention_of_rotated_tokens(prefix):
    layer = RotaryRippleAttention(24, 2, near="softmax", max_distance=7, num_prefix_tokens=prefix)
    tokens = randn(2, prefix + 5 * 7, 24)
    layer.spatial_weights.embedding.zero_()  # so all groups weigh the same
    out = layer.double()(tokens, grid_size=(5, 7))
    q, k, v = layer.qkv(tokens).unflatten(-1, (3, 2, 12)).clone().unbind(2)  # (B, L, N, D)
    for x in (q, k):
        x[:, prefix:] = rotate(x[:, prefix:].unflatten(1, (5, 7))).flatten(1, 2)
    mean = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert relative_error(out, layer.proj(mean.transpose(1, 2).flatten(2))) < 1e-12


def test_rotary_ripples_weigh_near_tokens_by_offsets_only():
    layer = RotaryRippleAttention(24, 2, near="softmax", weights="truncated", max_distance=2)
    layer.double()
    x = F.pad(randn(1, 3, 4, 24), (0, 0, 2, 5, 2, 4))  # zeros around, further than it sees
    moved = x.roll((2, 3), (1, 2))
    assert relative_error(layer(moved)[:, 4:7, 5:9], layer(x)[:, 2:5, 2:6]) < 1e-12


def test_models_without_ripples_refuse_rotary():
    with pytest.raises(ValueError, match="rotary is for ripple attention; got attention='linear'"):
        GridVisionTransformer(attention="linear", rotary=True)


def test_rotary_needs_pairs_in_both_halves():
    with pytest.raises(ValueError, match="4 must divide the width of a head; got 6"):
        RotaryRippleAttention(24, num_heads=4)
    with pytest.raises(ValueError, match="4 must divide the number of features; got 6"):
        RotaryLinearAttention(24, num_heads=2, num_features=6)
    with pytest.raises(ValueError, match="base must be positive; got base=0"):
        RotaryLinearAttention(24, num_heads=2, base=0)


# Permuted features


def test_powers_are_powers():
    layer = PermutedLinearAttention(96, num_heads=3)
    powers = layer.powers(40)
    assert powers.shape == (40, 3, 16)
    assert torch.equal(powers[0], torch.arange(16).expand(3, 16))
    for count in range(1, 40):
        assert torch.equal(powers[count], powers[1].gather(-1, powers[count - 1]))
    assert torch.equal(powers[1].sort(-1).values, powers[0])
    assert not torch.equal(powers[1][0], powers[1][1])


def test_permutation_moves_one_half_by_row_and_one_by_column():
    layer = make(PermutedLinearAttention)
    x = randn(1, 1, 1, 2, 8).expand(1, 5, 7, 2, 8)
    permuted = layer.permute(x)[0]
    assert torch.equal(permuted[0, 0], x[0, 0, 0])
    by_row, by_column = permuted.split(4, -1)
    assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
    assert torch.equal(by_column, by_column[:1].expand_as(by_column))
    power = layer.powers(4)[3]
    assert torch.equal(by_row[3, 0], x[0, 0, 0, :, :4].gather(-1, power))
    assert torch.equal(by_column[0, 3], x[0, 0, 0, :, 4:].gather(-1, power))


def test_permutations_are_those_of_the_seed():
    first, second = (PermutedLinearAttention(96, num_heads=3) for _ in range(2))
    assert torch.equal(first.powers(5), second.powers(5))
    other = PermutedLinearAttention(96, num_heads=3, seed=1)
    assert not torch.equal(first.powers(5), other.powers(5))
    assert not any(name in first.state_dict() for name, _ in first.named_buffers())


def test_permuted_features_weigh_numerator_and_denominator():
    layer = make(PermutedLinearAttention, eps=0.5)
    q, k, v = randn(2, 5, 7, 2, 12), randn(2, 5, 7, 2, 12, seed=4), randn(2, 5, 7, 2, 3, seed=5)
    phi_q, phi_k = (layer.permute(x) for x in layer.feature_map(q, k))
    expected = linear_attention(phi_q, phi_k, v, eps=0.5)
    assert torch.equal(layer.attend(q, k, v, None), expected)
    ones = make(PermutedLinearAttention, eps=0.0).attend(q, k, torch.ones_like(v), None)
    torch.testing.assert_close(ones, torch.ones_like(ones))


def test_permuted_features_come_in_two_halves():
    with pytest.raises(ValueError, match="must be even; got 7"):
        PermutedLinearAttention(24, num_heads=2, num_features=7)


# Stochastic encoding


def sine_kernel(layer, lag):
    freqs, gains = layer.freqs.sigmoid() / 2, F.softplus(layer.gains)
    waves = gains.square() * (2 * math.pi * freqs * lag + layer.offsets).cos()
    return waves.sum(-1) / (2 * freqs.shape[-1])


def conv_kernel(layer, lag):
    weight_q, weight_k = layer.conv_q, layer.conv_k
    taps = weight_q.shape[-1]
    total = torch.zeros_like(layer.gate)
    for t in range(max(0, -lag), min(taps, taps - lag)):
        total = total + weight_q[..., t] * weight_k[..., t + lag]
    return total


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "kernel"),
    [
        (SineSPELinearAttention, {"num_sines": 3}, sine_kernel),
        (ConvSPELinearAttention, {"kernel_size": 5}, conv_kernel),
    ],
)
@torch.no_grad()
def test_expected_products_are_the_kernel(kind, options, kernel, training):
    R, L = 20_000, 9
    torch.manual_seed(0)
    layer = kind(6, num_heads=2, num_realizations=R, feature_map="elu", **options).double()
    layer.train(training)
    code_q, code_k = layer.codes(L, torch.float64)
    gate = layer.gate.sigmoid()
    scale = (R / layer.head_dim) ** 0.5
    # A product of two normal numbers of variance V deviates by at most √2·V, their mean by /√R.
    variance = max(code.square().sum(-1).max() for code in (code_q, code_k)) / scale
    tolerance = 5 * (2 / R) ** 0.5 * variance
    assert tolerance < 0.1
    got = torch.einsum("indr,jncr->ijndc", code_q, code_k) / scale
    for i in range(L):
        for j in range(L):
            # Channels do not mix: what stands beside the diagonal is nothing but noise.
            expected = torch.diag_embed((1 - gate) * kernel(layer, i - j) + gate)
            assert (got[i, j] - expected).abs().max() < tolerance


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_noise_is_fresh_in_training_and_fixed_in_evaluation(kind, x):
    layer = make(kind)
    assert torch.equal(layer(x), layer(x))
    assert relative_error(make(kind, seed=1)(x), layer(x)) > 1e-3
    layer.train()
    assert relative_error(layer(x), layer(x)) > 1e-3
    layer.eval()
    torch.manual_seed(5)
    expected = make(kind)(x)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kind", STOCHASTIC)
@torch.no_grad()
def test_an_open_gate_leaves_no_position(kind, x):
    layer = make(kind)
    layer.gate.fill_(100.0)
    for code in layer.codes(12, torch.float64):
        torch.testing.assert_close(code, code[:1].expand_as(code))
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    shuffled = layer(x.flatten(1, 2)[:, order])
    assert relative_error(shuffled, layer(x.flatten(1, 2))[:, order]) < 1e-12
    layer.gate.zero_()
    shuffled = layer(x.flatten(1, 2)[:, order])
    assert relative_error(shuffled, layer(x.flatten(1, 2))[:, order]) > 1e-3


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_features_are_those_of_the_realizations(kind, x):
    layer = kind(24, num_heads=2, num_realizations=10, eps=0.5).double().eval()
    assert layer.feature_map.head_dim == 10
    q, k, v = (u.unflatten(-1, (2, 12)) for u in (x, x + 1, x + 2))
    code_q, code_k = (code.view(5, 7, 2, 12, 10) for code in layer.codes(35, torch.float64))
    q_hat = (q.unsqueeze(-1) * code_q).sum(-2)
    k_hat = (k.unsqueeze(-1) * code_k).sum(-2)
    expected = linear_attention(*layer.feature_map(q_hat, k_hat), v, eps=0.5)
    assert relative_error(layer.attend(q, k, v, None), expected) < 1e-12


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_check_eps(kind):
    assert kind(24, num_heads=2).eps == 1.0
    with pytest.raises(ValueError, match="finite number ≥ 0; got eps=-1.0"):
        kind(24, num_heads=2, eps=-1.0)


def test_stochastic_layers_check_their_options():
    with pytest.raises(ValueError, match="num_realizations must be at least 1.*seed=-1"):
        SineSPELinearAttention(24, num_heads=2, seed=-1)
    with pytest.raises(ValueError, match="at least one sine; got num_sines=0"):
        SineSPELinearAttention(24, num_heads=2, num_sines=0)
    with pytest.raises(ValueError, match="at least one tap; got kernel_size=0"):
        ConvSPELinearAttention(24, num_heads=2, kernel_size=0)


def test_seeded_noise_is_normal_and_uncorrelated():
    count = 200_000
    noise = torch.stack([seeded_normal((count,), s, torch.device("cpu")) for s in range(4)])
    noise = noise.double()
    assert noise.isfinite().all()
    assert noise.mean(-1).abs().max() < 5 * count**-0.5
    assert (noise.var(-1) - 1).abs().max() < 5 * (2 / count) ** 0.5
    assert (noise.pow(4).mean(-1) - 3).abs().max() < 5 * (96 / count) ** 0.5
    across = noise @ noise.T / count
    assert (across - torch.diag(across.diag())).abs().max() < 5 * count**-0.5
    for lag in (1, 2, 3, 32, 204, 395):
        along = (noise[:, lag:] * noise[:, :-lag]).mean(-1)
        assert along.abs().max() < 5 * (count - lag) ** -0.5
