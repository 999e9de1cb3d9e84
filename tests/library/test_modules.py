import copy
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

from inputs import assert_padding_alone_stays_finite, assert_padding_is_ignored, relative_error
from ripple_attention import (
    FEATURE_MAPS,
    LinearAttention,
    Partition,
    RippleAttention,
    SoftmaxAttention,
    create_feature_map,
    fixed_weights,
    linear_attention,
    record_spatial_weights,
    ripple_attention,
    stick_breaking,
)
from ripple_attention.modules import GridAttention
from ripple_attention.spatial_weights import WeightKind

LAYERS = [RippleAttention, LinearAttention, SoftmaxAttention]
KNOBS = [
    {"max_distance": 1},
    {"max_distance": 20},
    {"partition": "logarithmic", "max_distance": 7},
    {"partition": "foveal", "max_distance": 2, "tile": 3},
    {"partition": Partition((1, 4))},
    {"weights": "fixed"},
    {"weights": "softmax"},
    {"weights": "truncated"},
    {"halt_threshold": 0.5},
    {"halt_threshold": 0.5, "tail": "printed"},
    {"balanced": False},
    {"feature_map": "elu"},
    {"feature_map": "performer", "num_features": 20},
    {"feature_map_options": {"scaling": "scaled"}},
    {"eps": 0.0},
    {"qkv_bias": False},
    {"implementation": "table"},
]


def make(kind, **options):
    torch.manual_seed(0)
    return kind(24, num_heads=2, **options).double()


@pytest.fixture
def x():
    return torch.randn(2, 5, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", LAYERS)
def test_grids_and_rows_of_tokens_give_the_same(kind, x):
    layer = make(kind)
    mask = torch.zeros(2, 5, 7, dtype=torch.bool)
    mask[:, 3:] = True
    grid = layer(x, key_padding_mask=mask)
    row = layer(x.flatten(1, 2), grid_size=(5, 7), key_padding_mask=mask.flatten(1))
    assert grid.shape == x.shape
    assert torch.equal(grid.flatten(1, 2), row)


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_are_named_as_in_timm(kind):
    names = {name.split(".")[0] for name, _ in make(kind).named_parameters()}
    assert {"qkv", "proj"} <= names <= {"qkv", "proj", "feature_map", "spatial_weights"}
    assert make(kind).qkv.weight.shape == (72, 24)


@pytest.mark.parametrize("kind", LAYERS)
def test_values_may_come_from_elsewhere(kind, x):
    layer = make(kind)
    assert relative_error(layer(x, x.clone()), layer(x)) < 1e-12
    other = torch.randn_like(x)
    assert relative_error(layer(x, other), layer(x)) > 1e-3
    assert relative_error(layer(x, 2 * other), layer(x, other)) > 1e-3


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_takes_values_of_another_type(kind, x):
    layer, x = make(kind).float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(layer(x, x.bfloat16()), layer(x)) < 0.01


@pytest.mark.parametrize("kind", LAYERS)
def test_masked_tokens_do_not_matter(kind, x):
    assert_padding_is_ignored(make(kind), x)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_image_of_padding_alone_stays_finite(kind, x):
    assert_padding_alone_stays_finite(make(kind), x)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_passes_gradcheck(kind):
    torch.manual_seed(0)
    layer = kind(4, num_heads=2).double()
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: layer(a, b), (x, value))


@pytest.mark.parametrize("options", KNOBS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_every_knob_turns(options, x):
    plain, turned = make(RippleAttention), make(RippleAttention, **options)
    out = turned(x)
    assert out.shape == x.shape
    out.sum().backward()
    if options == {"implementation": "table"}:
        assert relative_error(out, plain(x)) < 1e-12
    else:
        assert relative_error(out, plain(x)) > 1e-6


@pytest.mark.parametrize(("options", "eps"), [({}, 1.0), ({"eps": 0.1}, 0.1), ({"eps": 0}, 0.0)])
@torch.no_grad()
def test_layers_add_1_to_the_denominator_unless_told(options, eps, x):
    q, k, v = (u.unflatten(-1, (2, 12)) for u in (x, x + 1, x + 2))
    linear, ripple = make(LinearAttention, **options), make(RippleAttention, **options)
    expected = linear_attention(*linear.feature_map(q, k), v, eps=eps)
    assert torch.equal(linear.attend(q, k, v, None), expected)
    expected = ripple_attention(
        *ripple.feature_map(q, k), v, ripple.spatial_weights(v), partition=ripple.partition, eps=eps
    )
    assert torch.equal(ripple.attend(q, k, v, None), expected)


def test_uniform_weights_make_a_ripple_layer_a_linear_one(x):
    # Weights of 1/G make the sums of a ripple G times smaller: so must be what is added to them.
    ripple, linear = make(RippleAttention, eps=0.2), make(LinearAttention, eps=1.0)
    assert ripple.partition.num_groups == 5
    with torch.no_grad():
        ripple.spatial_weights.embedding.zero_()
    linear.load_state_dict(ripple.state_dict(), strict=False)
    assert relative_error(ripple(x), linear(x)) < 1e-12


def test_softmax_layer_is_pytorchs_multi_head_attention(x):
    ours = make(SoftmaxAttention)
    theirs = nn.MultiheadAttention(24, 2, batch_first=True).double()
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv.weight.data, ours.qkv.bias.data
    theirs.out_proj.load_state_dict(ours.proj.state_dict())
    mask = torch.zeros(2, 35, dtype=torch.bool)
    mask[:, 30:] = True
    tokens = x.flatten(1, 2)
    expected, _ = theirs(tokens, tokens, tokens, key_padding_mask=mask)
    assert relative_error(ours(tokens, key_padding_mask=mask), expected) < 1e-12


def test_recording_spatial_weights_changes_nothing(x):
    model = nn.Sequential(make(RippleAttention), nn.GELU(), make(RippleAttention, weights="fixed"))
    expected = model(x)
    with record_spatial_weights(model) as weights:
        assert torch.equal(model(x), expected)
    assert list(weights) == ["0.spatial_weights", "2.spatial_weights"]
    first = weights["0.spatial_weights"]
    assert first.shape == (2, 5, 7, 2, 5) and not first.requires_grad
    torch.testing.assert_close(first.sum(-1), torch.ones(2, 5, 7, 2, dtype=torch.float64))
    assert torch.equal(weights["2.spatial_weights"][0, 0, 0, 0], fixed_weights(5).double())
    before = dict(weights)
    model(x + 1)  # outside the block nothing is recorded
    assert all(weights[name] is before[name] for name in before)


def test_weights_come_from_the_querys_own_value(x):
    layer = make(RippleAttention)
    with record_spatial_weights(layer) as before:
        layer(x)
    moved = x.clone()
    moved[0, 2, 3] += 1
    with record_spatial_weights(layer) as after:
        layer(moved)
    changed = (before["spatial_weights"] != after["spatial_weights"]).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[0, 2, 3]]


def test_weights_start_near_uniform_or_near_halves(x):
    for balanced in (True, False):
        layer = make(RippleAttention, balanced=balanced)
        with record_spatial_weights(layer) as weights:
            layer(x)
        expected = stick_breaking(torch.zeros(4, dtype=torch.float64), balanced)
        assert (weights["spatial_weights"] - expected).abs().max() < 0.05


def test_layers_copy_and_reload(x):
    layer = make(RippleAttention)
    clone = copy.deepcopy(layer)
    assert torch.equal(clone(x), layer(x))
    fresh = RippleAttention(24, num_heads=2).double()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))


def test_layers_run_in_pure_half_precision(x):
    for kind in LAYERS:
        layer = make(kind).bfloat16()
        out = layer(x.bfloat16())
        assert out.dtype == torch.bfloat16
        assert relative_error(out, make(kind)(x)) < 0.05


def test_layers_run_on_meta_tensors():
    with torch.device("meta"):
        layer = RippleAttention(24, num_heads=2)
        assert layer(torch.empty(2, 5, 7, 24)).shape == (2, 5, 7, 24)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(kind, 24, 2) for kind in (GridAttention, *LAYERS)),
        *(partial(RippleAttention, 24, 2, weights=kind) for kind in get_args(WeightKind)),
        *(partial(LinearAttention, 24, 2, feature_map=name) for name in FEATURE_MAPS),
    ],
)
def test_parameters_are_made_where_and_as_asked(make):
    for device, dtype in (("meta", torch.float16), ("cpu", torch.bfloat16)):
        for tensor in make(device=device, dtype=dtype).state_dict().values():
            assert tensor.device.type == device and tensor.dtype == dtype


@pytest.mark.parametrize("kind", [LinearAttention, RippleAttention])
def test_dropout_of_probabilities_that_nobody_forms_is_refused(kind):
    assert kind(24, num_heads=2, attn_drop=0.0).head_dim == 12
    with pytest.raises(ValueError, match=r"no matrix of prob.*got attn_drop=0.1. Use proj_drop"):
        kind(24, num_heads=2, attn_drop=0.1)


def test_bad_input_is_refused(x):
    layer = make(RippleAttention)
    with pytest.raises(ValueError, match="needs to know where tokens lie.*class token"):
        layer(x.flatten(1, 2))
    with pytest.raises(ValueError, match=r"H·W = L; got grid_size=\(5, 6\)"):
        layer(x.flatten(1, 2), grid_size=(5, 6))
    with pytest.raises(ValueError, match=r"H·W = L; got grid_size=\(2, 17\).*class token"):
        layer(x.flatten(1, 2), grid_size=(2, 17))
    with pytest.raises(TypeError, match="feature_map is a name or a FeatureMap.*got ReLU"):
        make(RippleAttention, feature_map=torch.nn.ReLU())
    with pytest.raises(
        ValueError, match=r"takes floating-point x as \(B, H, W, 24\).*got x.shape=\(2, 5, 7, 12\)"
    ):
        layer(x[..., :12])
    with pytest.raises(ValueError, match="dtype of RippleAttention's weights.*bfloat16.*float64"):
        layer(x.bfloat16())
    without = pytest.raises(ValueError, match="with RippleAttention layers; got Linear, which")
    with without, record_spatial_weights(torch.nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="value.shape="):
        layer(x, x[:, :4])
    with pytest.raises(ValueError, match=r"value must be a tensor .* by name: grid_size=\(5, 7\)"):
        layer(x.flatten(1, 2), (5, 7))
    with pytest.raises(ValueError, match="must be bool"):
        layer(x, key_padding_mask=torch.zeros(2, 5, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="divide dim; got dim=24, num_heads=5"):
        RippleAttention(24, num_heads=5)
    with pytest.raises(ValueError, match="max_distance"):
        RippleAttention(24, num_heads=2, max_distance=0)
    with pytest.raises(
        ValueError, match="one of chebyshev, logarithmic, foveal or a Partition; got 'dense'"
    ):
        RippleAttention(24, num_heads=2, partition="dense")
    with pytest.raises(ValueError, match="implementation must be one of"):
        RippleAttention(24, num_heads=2, implementation="fast")
    for kind in (RippleAttention, LinearAttention):
        with pytest.raises(ValueError, match="finite number ≥ 0; got eps=-1.0"):
            kind(24, num_heads=2, eps=-1.0)
    with pytest.raises(ValueError, match="or a Partition; got"):
        RippleAttention(24, num_heads=2, partition=[0, 1])
    with pytest.raises(ValueError, match="must be a whole number ≥ 1; got num_heads=2.0"):
        RippleAttention(24, num_heads=2.0)
    for grid_size in (35, (-5, -7), (5, 7, 1)):
        with pytest.raises(ValueError, match="H·W = L"):
            layer(x.flatten(1, 2), grid_size=grid_size)
    with pytest.raises(ValueError, match="floating-point"):
        layer(x.int())


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_checks_its_mask(kind, x):
    layer = make(kind)
    for mask in (
        torch.zeros(2, 7, 5, dtype=torch.bool),
        torch.zeros(1, 5, 7, dtype=torch.bool),
        torch.zeros(2, 5, 7),
        [[False]],
    ):
        with pytest.raises(ValueError, match="key_padding_mask must be"):
            layer(x, key_padding_mask=mask)
    with pytest.raises(ValueError, match="key_padding_mask must be"):
        layer(x.flatten(1, 2), grid_size=(5, 7), key_padding_mask=torch.zeros(2, 30).bool())


@pytest.mark.parametrize("feature_map", ["learned", "performer", None])
def test_what_stands_in_the_padding_stays_there(feature_map, x):
    layer = (
        make(RippleAttention, feature_map=feature_map) if feature_map else make(SoftmaxAttention)
    )
    layer.eval()
    mask = torch.zeros(2, 5, 7, dtype=torch.bool)
    mask[:, 4:] = True
    expected = layer(x, key_padding_mask=mask)[~mask]
    x[mask] = torch.nan
    assert torch.equal(layer(x, key_padding_mask=mask)[~mask], expected)


@pytest.mark.parametrize("kind", [RippleAttention, LinearAttention])
def test_options_of_a_feature_map_that_is_made_already_are_refused(kind):
    own = create_feature_map("learned", 12, num_features=20)
    for options in ({}, {"num_features": 20}, {"feature_map_options": {}}):
        assert make(kind, feature_map=own, **options).feature_map.num_features == 20
    with pytest.raises(ValueError, match=r"num_features=99.* Learned of 20 .*Leave"):
        make(kind, feature_map=own, num_features=99)
    with pytest.raises(ValueError, match=r"feature_map_options={'scaling': 'none'}.*Leave"):
        make(kind, feature_map=own, feature_map_options={"scaling": "none"})


def test_fixed_weights_survive_initialisation_on_meta(x):
    source = make(RippleAttention, weights="fixed")
    with torch.device("meta"):
        target = RippleAttention(24, num_heads=2, weights="fixed").double()
    target.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(target(x), source(x))
