"""The vision transformers of the paper, as a timm user meets them."""

from inspect import signature

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm.layers import Mlp, PatchEmbed  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

from inputs import relative_error  # noqa: E402
from ripple_attention import RippleAttention, record_spatial_weights  # noqa: E402
from ripple_attention.models import MODELS, adapt_state_dict, count_parameters  # noqa: E402
from ripple_attention.models.vit import GridBlock, PatchProjection  # noqa: E402
from ripple_lab.paper import PARAMETERS  # noqa: E402

SMALL = [name for name in MODELS if name.endswith("patch2_32")]

# Table 8 counts the two 12-layer models 0.05 M higher than table 2 and than the sum of their parts.
PAPER = {
    name: min(tables.values())
    for name, tables in PARAMETERS.items()
    if "table 1" in tables or "tiny4" in name
}


def create(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options)


@pytest.mark.parametrize("name", PAPER)
def test_parameter_counts_are_the_papers(name):
    with torch.device("meta"):
        count = count_parameters(create(name)) / 1e6
    assert abs(count - PAPER[name]) <= 0.03


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name):
    model = create(name, depth=3)
    out = model(torch.randn(2, 3, 32, 32))
    assert out.shape == (2, 100)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_images_of_any_shape_are_taken(name):
    model = create(name, depth=2, dynamic_img_size=True).eval()
    assert model(torch.randn(1, 3, 24, 40)).shape == (1, 100)
    features, maps = model.forward_intermediates(torch.randn(1, 3, 24, 40))
    assert features.shape == (1, 12 * 20, 192)
    assert [tuple(m.shape) for m in maps] == [(1, 192, 12, 20)] * 2
    rows = model.forward_intermediates(
        torch.randn(1, 3, 24, 40), output_fmt="NLC", intermediates_only=True
    )
    assert [tuple(row.shape) for row in rows] == [(1, 240, 192)] * 2


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32)])
def test_images_of_another_kind_are_refused_in_words(shape):
    model = timm.create_model("ripple_tiny4_patch2_32", depth=1)
    with pytest.raises(ValueError, match=r"come as \(B, 3, height, width\); got .* in_chans="):
        model(torch.zeros(shape))
    grey = timm.create_model("ripple_tiny4_patch2_32", depth=1, in_chans=1)
    assert grey(torch.zeros(1, 1, 32, 32)).shape == (1, 100)


def test_features_only():
    model = create("ripple_tiny_patch2_32", depth=4, features_only=True, out_indices=(1, 3))
    maps = model(torch.randn(1, 3, 32, 32))
    assert [tuple(m.shape) for m in maps] == [(1, 192, 16, 16)] * 2


def test_the_classifier_can_be_reset():
    model = create("ripple_tiny_patch2_32", depth=2)
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 192)


def test_gradient_checkpointing_changes_nothing():
    model = create("ripple_tiny_patch2_32", depth=2)
    x = torch.randn(1, 3, 32, 32)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    checked = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for ours, reference in zip(checked, plain, strict=True):
        assert relative_error(ours, reference) < 1e-6


def test_the_first_layers_ripple():
    model = create("ripple_tiny_patch2_32")
    kinds = [type(block.attn).__name__ for block in model.blocks]
    assert kinds == ["RippleAttention"] * 9 + ["LinearAttention"] * 3
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"ripple_layers .* 0 to 2 .* depth 2; got {wrong}"):
            create("ripple_tiny_patch2_32", ripple_layers=wrong, depth=2)
    model = create("ripple_tiny_patch2_32", ripple_layers=0, depth=2)
    assert not any(isinstance(block.attn, RippleAttention) for block in model.blocks)


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"max_distance": 2}, 3),
        ({"partition": "logarithmic", "max_distance": 15}, 6),
        ({"partition": "dense"}, 16),
        ({"weights": "softmax"}, 5),
        ({"weights": "truncated"}, 5),
        ({"weights": "fixed"}, 5),
        ({"halt_threshold": 0.1}, 5),
        ({"feature_map": "dpfp"}, 5),
        ({"feature_map_options": {"scaling": "scaled"}}, 5),
        ({"pos_embed": "none"}, 5),
    ],
)
def test_the_papers_options_reach_the_layers(options, groups):
    model = create("ripple_tiny_patch2_32", depth=2, **options).eval()
    with record_spatial_weights(model) as weights, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert {w.shape[-1] for w in weights.values()} == {groups}
    assert (model.pos_embed is None) == (options.get("pos_embed") == "none")


@pytest.mark.parametrize(("options", "eps"), [({}, 1.0), ({"eps": 0.1}, 0.1)])
@pytest.mark.parametrize("name", SMALL)
def test_eps_reaches_every_layer_with_features(name, options, eps):
    layers = [block.attn for block in create(name, depth=2, ripple_layers=1, **options).blocks]
    for layer in layers:
        assert hasattr(layer, "feature_map") == hasattr(layer, "eps")
        assert getattr(layer, "eps", eps) == eps
    if name == "ripple_tiny_patch2_32":
        assert [layer.eps for layer in layers] == [eps, eps]


def test_a_deit_checkpoint_loads_with_its_positions_resized():
    source = timm.create_model("deit_tiny_patch16_224")
    for tokens in (0, 1):
        target = create(
            "deit6_tiny_patch16_224", img_size=160, num_heads=3, class_token=tokens == 1
        )
        target.load_state_dict(adapt_state_dict({"model": source.state_dict()}, target))
        assert torch.equal(target.blocks[3].attn.qkv.weight, source.blocks[3].attn.qkv.weight)
        assert target.pos_embed.shape == (1, 100 + tokens, 192)
    assert torch.equal(target.cls_token, source.cls_token)
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])
    without = create("deit6_tiny_patch16_224", num_heads=3)
    with pytest.raises(RuntimeError, match="size mismatch for pos_embed"):
        target.load_state_dict(adapt_state_dict(without.state_dict(), target), strict=False)


@pytest.mark.parametrize("class_token", [False, True])
def test_the_softmax_model_is_deit_with_a_mean_or_a_class_token(class_token):
    theirs = timm.create_model(
        "deit_tiny_patch16_224", depth=3, fc_norm=False, dynamic_img_size=True,
        class_token=class_token, global_pool="token" if class_token else "avg",
    ).eval()  # fmt: skip
    ours = create("deit6_tiny_patch16_224", num_heads=3, depth=3, class_token=class_token).eval()
    ours.load_state_dict(theirs.state_dict())
    for size in ((224, 224), (160, 192)):
        x = torch.randn(1, 3, *size)
        assert relative_error(ours(x), theirs(x)) < 1e-5
        got, expected = (m.forward_intermediates(x, indices=1)[1][0] for m in (ours, theirs))
        assert got.shape == expected.shape == (1, 192, size[0] // 16, size[1] // 16)
        assert relative_error(got, expected) < 1e-5


TOKENS = {"class_token": True, "reg_tokens": 4}


@pytest.mark.parametrize("name", ["deit_la_tiny_patch2_32", "ripple_tiny_patch2_32"])
def test_models_take_a_class_token_and_registers(name):
    torch.manual_seed(0)
    model = create(name, depth=2, ripple_layers=1, **TOKENS)
    assert model.pos_embed.shape == (1, 5 + 256, 192)
    for size in ((32, 32), (20, 36)):  # the grid is known of each image
        assert model(torch.randn(2, 3, *size)).shape == (2, 100)
    wide = model.forward_intermediates(torch.randn(1, 3, 20, 36), intermediates_only=True)
    assert [y.shape for y in wide] == [(1, 192, 10, 18)] * 2


def test_attentions_that_need_a_grid_and_know_no_prefix_refuse_it():
    for name in ("convit6_tiny_patch2_32", "deit_la_rope_tiny_patch2_32"):
        with pytest.raises(
            ValueError, match="takes no class_token and .*: pool the tokens instead"
        ):
            create(name, depth=2, class_token=True)
    with pytest.raises(ValueError, match="needs the whole grid; got patch_drop_rate=0.5"):
        create("ripple_tiny_patch2_32", depth=1, patch_drop_rate=0.5, **TOKENS)
    with pytest.raises(ValueError, match="cannot be recomputed by checkpoints"):
        create("ripple_tiny_patch2_32", depth=1, **TOKENS).set_grad_checkpointing()
    with pytest.raises(ValueError, match="no_embed_class is not for models on a grid"):
        create("deit6_tiny_patch2_32", depth=1, no_embed_class=True)


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_ripples_that_are_softmax_give_timms_outputs_with_class_and_register_tokens(no_embed_class):
    options = {"depth": 2, "no_embed_class": no_embed_class, **TOKENS}
    theirs = timm.create_model("deit_tiny_patch16_224", dynamic_img_size=True, **options).eval()
    near = {"near": "softmax", "max_distance": 14, "halt_threshold": 0.0}
    ours = create("ripple_tiny_patch16_224", num_heads=3, **near, **options).eval()
    missing, unknown = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unknown and all(".attn." in name for name in missing)
    for block in ours.blocks:
        nn.init.zeros_(block.attn.spatial_weights.embedding)
    for size in ((224, 224), (160, 192)):
        x = torch.randn(1, 3, *size)
        assert relative_error(ours(x), theirs(x)) < 1e-5


def test_a_model_with_a_class_token_compiles_as_one_graph():
    torch.manual_seed(0)
    model = create("ripple_tiny_patch2_32", depth=1, embed_dim=24, num_heads=2, **TOKENS).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((16, 12), (16, 20)):
        x = torch.randn(2, 3, *size)
        assert relative_error(compiled(x), model(x)) < 1e-5


@pytest.mark.parametrize("name", ["ripple_tiny_patch2_32", "deit6_tiny_patch2_32"])
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("qk_norm", True, "leave it out"),
        ("scale_attn_norm", True, "leave it out"),
        ("proj_bias", False, "leave it out"),
        ("attn_drop_rate", 0.5, "leave it out"),
        ("attn_layer", "diff", "choose one by attention="),
        ("patch_drop_rate", 0.5, "leave it out"),
        ("fix_init", True, "leave it out"),
    ],
)
def test_options_of_timm_that_would_do_nothing_are_refused(name, option, value, remedy):
    if option not in signature(VisionTransformer).parameters:
        pytest.skip(f"this timm has no {option}")
    with pytest.raises(ValueError, match=f"^{option} is not for models on a grid.*: {remedy}$"):
        create(name, depth=1, **{option: value})


@pytest.mark.parametrize("name", SMALL)
def test_options_of_timm_as_they_are_by_default_are_taken(name):
    known = signature(VisionTransformer).parameters
    options = ("qk_norm", "scale_attn_norm", "proj_bias", "attn_layer", "fix_init", "init_values")
    options += ("patch_drop_rate", "attn_drop_rate", "scale_mlp_norm", "device", "dtype")
    given = create(name, depth=1, **{n: known[n].default for n in options if n in known})
    plain = create(name, depth=1).state_dict()
    assert given.state_dict().keys() == plain.keys()
    assert all(torch.equal(given.state_dict()[key], value) for key, value in plain.items())


def test_what_timm_gives_to_its_blocks_in_other_versions_is_taken_unless_it_is_set():
    sizes = {"dim": 8, "num_heads": 2, "mlp_ratio": 2.0}
    layers = {"mlp_layer": Mlp, "act_layer": nn.GELU, "norm_layer": nn.LayerNorm}
    for default in (None, False, 0, 0.0):
        GridBlock(**sizes, **layers, of_tomorrow=default)
    with pytest.raises(ValueError, match="of_tomorrow is not .* got of_tomorrow=3: leave it out"):
        GridBlock(**sizes, **layers, of_tomorrow=3)


def test_a_class_tokens_row_may_lose_patches():
    model = create("deit6_tiny_patch2_32", depth=1, class_token=True, patch_drop_rate=0.5)
    lengths = []
    model.blocks[0].register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    model(torch.randn(2, 3, 32, 32))
    model.eval()(torch.randn(2, 3, 32, 32))
    assert lengths == [1 + 128, 1 + 256]


def test_layer_scale_and_normed_mlps_are_timms():
    options = {"depth": 2, "init_values": 0.3, "scale_mlp_norm": True}
    theirs = timm.create_model(
        "deit_tiny_patch16_224", class_token=False, global_pool="avg", fc_norm=False, **options
    ).eval()
    ours = create("deit6_tiny_patch16_224", num_heads=3, **options).eval()
    assert torch.equal(ours.blocks[1].ls2.gamma, torch.full((192,), 0.3))
    for name, parameter in theirs.named_parameters():
        if "ls" in name or "mlp.norm" in name:
            nn.init.uniform_(parameter, 0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 224, 224)
    assert relative_error(ours(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_layer_scale_is_of_every_attention(name):
    model = create(name, depth=1, init_values=0.5).eval()
    block, x = model.blocks[0], torch.randn(1, 16, 16, 192)
    for scale in (block.ls1, block.ls2):
        nn.init.zeros_(scale.gamma)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("name", SMALL)
def test_a_dtype_is_that_of_every_parameter(name):
    if "dtype" not in signature(VisionTransformer).parameters:
        pytest.skip("this timm has no dtype")
    model = create(name, depth=1, dtype=torch.float64)
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64


def test_safetensors_load(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    source = create("ripple_tiny4_patch2_32")
    torch.nn.init.normal_(source.head.weight)
    path = tmp_path / "model.safetensors"
    safetensors.save_file(source.state_dict(), path)
    target = timm.create_model("ripple_tiny4_patch2_32", checkpoint_path=str(path))
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(source.eval()(x), target.eval()(x))


def test_data_settings_are_known_to_timm():
    config = timm.data.resolve_model_data_config(create("ripple_tiny4_patch2_32"))
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == (0.5071, 0.4865, 0.4409)


def test_a_model_compiles_without_a_graph_break():
    torch._dynamo.reset()
    model = create("ripple_tiny_patch2_32", depth=2, ripple_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 32, 32)
    assert relative_error(compiled(x), model(x)) < 1e-5


def test_unknown_attention_names_the_known():
    with pytest.raises(ValueError, match="attention must be one of ripple, .*; got 'flash'"):
        create("ripple_tiny_patch2_32", attention="flash")


def test_multiply_adds_are_those_of_the_parts():
    from ripple_lab.bench.cost import multiply_adds

    model = create("deit_la_tiny_patch2_32", depth=1)
    tokens, width, heads, head = 256, 192, 6, 32
    dense = tokens * (3 * 2 * 2 * width + (4 + 8) * width**2) + width * 100
    features = 2 * tokens * heads * (head * head + 2 * head * head)
    attention = tokens * heads * (2 * head * head + head)
    assert abs(multiply_adds(model, (3, 32, 32)) / (dense + features + attention) - 1) < 0.01
    softmax = create("deit6_tiny_patch2_32", depth=1)
    expected = dense + tokens * heads * 256 * 2 * head
    assert abs(multiply_adds(softmax, (3, 32, 32)) / expected - 1) < 0.01
    ripple = create("ripple_tiny_patch2_32", depth=1)
    weights = tokens * heads * (head * head + 4 * head)
    pairs = tokens * heads * (256 * 2 * head + 2 * head * head)  # 16×16 tokens are one tile
    expected = dense + features + weights + pairs
    assert abs(multiply_adds(ripple, (3, 32, 32)) / expected - 1) < 0.01


@pytest.mark.parametrize(("image", "patch"), [((32, 32), 2), ((20, 28), (4, 7)), ((50, 37), 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_projected_as_a_convolution_projects_them(image, patch, bias):
    projection = PatchProjection(3, 24, patch, bias).double()
    plain = nn.Conv2d(3, 24, kernel_size=patch, stride=patch, bias=bias).double()
    plain.load_state_dict(projection.state_dict())
    x = torch.randn(2, 3, *image, dtype=torch.float64, requires_grad=True)
    outputs = projection(x), plain(x)
    upstream = torch.randn_like(outputs[0])
    grads = [
        torch.autograd.grad(out, (x, *module.parameters()), upstream)
        for out, module in zip(outputs, (projection, plain), strict=True)
    ]
    for ours, reference in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]), strict=True):
        torch.testing.assert_close(ours, reference)
    with torch.autocast("cpu", torch.bfloat16):
        assert projection(x).dtype == torch.float64
        assert projection.float()(x.float()).dtype == torch.bfloat16


def test_models_start_with_the_numbers_that_timm_draws():
    torch.manual_seed(0)
    ours = timm.create_model("deit6_tiny_patch2_32", depth=1).patch_embed
    torch.manual_seed(0)
    plain = timm.create_model("deit6_tiny_patch2_32", depth=1, embed_layer=PatchEmbed).patch_embed
    assert type(ours.proj) is PatchProjection and type(plain.proj) is nn.Conv2d
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
