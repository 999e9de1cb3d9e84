import math

import pytest
import timm
import torch

from inputs import assert_padding_is_ignored, relative_error
from ripple_attention.models.gated import GatedPositionalAttention
from ripple_attention.models.registry import adapt_state_dict


def make(num_heads=4, **options):
    torch.manual_seed(0)
    return GatedPositionalAttention(24, num_heads=num_heads, **options).double().eval()


def randn(*shape, seed=3):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def x():
    return randn(2, 5, 7, 24)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("num_heads", [1, 4, 6])
def test_equals_timm_with_its_weights(num_heads, qkv_bias):
    convit = pytest.importorskip("timm.models.convit")
    torch.manual_seed(1)
    theirs = convit.GPSA(24, num_heads=num_heads, qkv_bias=qkv_bias).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = make(num_heads, qkv_bias=qkv_bias)
    ours.load_state_dict(theirs.state_dict())
    x = randn(2, 36, 24)
    assert relative_error(ours(x, grid_size=(6, 6)), theirs(x)) < 1e-12


@pytest.mark.parametrize("num_heads", [1, 4, 6])
def test_starts_as_timm_starts(num_heads):
    convit = pytest.importorskip("timm.models.convit")
    theirs = convit.GPSA(24, num_heads=num_heads)
    theirs.local_init()
    ours = GatedPositionalAttention(24, num_heads=num_heads)
    covered = math.isqrt(num_heads) ** 2
    assert torch.equal(ours.pos_proj.weight[:covered], theirs.pos_proj.weight[:covered])
    assert torch.equal(ours.v.weight, theirs.v.weight)
    assert torch.equal(ours.gating_param, theirs.gating_param)
    assert ours.pos_proj.weight[covered:].abs().lt(0.1).all()  # near uniform


def test_heads_start_at_their_offsets():
    torch.manual_seed(0)
    layer = GatedPositionalAttention(27, num_heads=9)
    attention = layer.position_scores(6, 8).softmax(-1)[0].view(9, 6, 8, 6, 8)
    for head in range(9):
        dx, dy = head // 3 - 1, head % 3 - 1
        for y, x in [(2, 3), (3, 5), (4, 1)]:
            best = attention[head, y, x].flatten().argmax().item()
            assert divmod(best, 8) == (y + dy, x + dx)


def test_init_can_be_repeated(x):
    layer = make()
    expected = layer.state_dict()["pos_proj.weight"].clone()
    with torch.no_grad():
        layer.pos_proj.weight.normal_()
        layer.v.weight.normal_()
    layer.init_weights()
    assert torch.equal(layer.pos_proj.weight, expected)
    assert torch.equal(layer.v.weight, torch.eye(24, dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (9, 4), (4, 9)])
def test_any_grid_is_the_definition(grid):
    layer = make(6)
    torch.nn.init.normal_(layer.pos_proj.weight, std=0.3)
    torch.nn.init.normal_(layer.gating_param)
    x = randn(2, *grid, 24)
    q, k, v = (u.flatten(1, 2) for u in layer._project(x, None))
    rows, columns = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    dx = columns.flatten() - columns.flatten()[:, None]
    dy = rows.flatten() - rows.flatten()[:, None]
    relative = torch.stack([dx, dy, dx**2 + dy**2], -1).double()
    by_position = layer.pos_proj(relative).permute(2, 0, 1).softmax(-1)
    by_content = (torch.einsum("bind,bjnd->bnij", q, k) / 4**0.5).softmax(-1)
    gate = layer.gating_param.sigmoid()[:, None, None]
    attention = (1 - gate) * by_content + gate * by_position
    attention = attention / attention.sum(-1, keepdim=True)
    expected = layer.proj(torch.einsum("bnij,bjnd->bind", attention, v).flatten(2)).view(x.shape)
    assert relative_error(layer(x), expected) < 1e-12


def test_padded_tokens_do_not_matter(x):
    layer = make()
    mask = assert_padding_is_ignored(layer, x)
    smaller = layer(x[1:, :, :5])
    assert relative_error(layer(x, key_padding_mask=mask)[1:, :, :5], smaller) < 1e-12


def test_an_image_of_padding_alone_stays_finite(x):
    layer = make()
    mask = torch.zeros(2, 5, 7, dtype=torch.bool)
    mask[0] = True
    out = layer(x, key_padding_mask=mask)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_gradients_are_right():
    layer = make()
    x, value = randn(1, 2, 3, 24).requires_grad_(), randn(1, 2, 3, 24, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x, value))


def test_rows_of_tokens_need_their_grid(x):
    layer = make()
    assert torch.equal(layer(x.flatten(1, 2), grid_size=(5, 7)), layer(x).flatten(1, 2))
    with pytest.raises(ValueError, match="needs to know where tokens lie"):
        layer(x.flatten(1, 2))


def test_compiles_and_runs_in_half_precision(x):
    torch.compiler.reset()
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), layer(x)) < 1e-12
    out = make().bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16 and relative_error(out, layer(x)) < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(make().float()(x.float()), layer(x)) < 0.05


def test_official_convit_weights_give_its_features():
    convit = pytest.importorskip("timm.models.convit")
    torch.manual_seed(1)
    theirs = convit.ConVit(embed_dim=48, num_heads=4, local_up_to_layer=10, depth=12, num_classes=5)
    theirs = theirs.double().eval()
    ours = timm.create_model("convit4_tiny_patch16_224", num_classes=5).double().eval()
    ours.load_state_dict(adapt_state_dict(theirs.state_dict(), ours))
    x = randn(1, 3, 224, 224)
    tokens = theirs.patch_embed(x) + theirs.pos_embed
    for block in theirs.blocks:  # without the class token, which enters before the last two
        tokens = block(tokens)
    expected = theirs.head(theirs.norm(tokens).mean(1))
    assert relative_error(ours(x), expected) < 1e-12
