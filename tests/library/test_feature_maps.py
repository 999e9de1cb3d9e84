import math

import pytest
import torch

from ripple_attention import FEATURE_MAPS, create_feature_map
from ripple_attention.feature_maps import RandomFeatureMap

NAMES = list(FEATURE_MAPS)
RANDOM = [name for name, kind in FEATURE_MAPS.items() if issubclass(kind, RandomFeatureMap)]


@pytest.fixture
def x():
    return torch.randn(
        2, 3, 4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def make(name, **options):
    torch.manual_seed(0)
    return create_feature_map(name, 8, num_heads=2, **options).double()


@pytest.mark.parametrize("name", NAMES)
def test_maps_queries_and_keys_to_their_width(name, x):
    feature_map = make(name)
    phi_q, phi_k = feature_map(x, x.flip(1))
    assert phi_q.shape == phi_k.shape == (*x.shape[:-1], feature_map.num_features)
    assert phi_q.dtype == x.dtype
    if name != "rfa":
        assert (phi_q >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_feature_map_passes_gradcheck(name, x):
    feature_map = make(name).eval()
    parameters = dict(feature_map.named_parameters())

    def run(q, k, *tensors):
        named = dict(zip(parameters, tensors, strict=True))
        return torch.func.functional_call(feature_map, named, (q, k))

    q, k = (t.clone().requires_grad_() for t in (x[:1, :1, :2], x[1:, :1, :2]))
    if name == "performer":  # the shift by the maximum cancels in attention and has no gradient
        feature_map.features = lambda x, draw, is_key: torch.exp(
            x @ draw.mT - x.square().sum(-1, keepdim=True) / 2
        )
    assert torch.autograd.gradcheck(run, (q, k, *parameters.values()))


def test_learned_map_follows_its_equation(x):
    feature_map = make("learned", scaling="none")
    angles = x @ feature_map.w1.T
    inner = torch.cat([angles.sin(), angles.cos()], -1)
    expected = (inner @ feature_map.fc.weight.T + feature_map.fc.bias).relu()
    torch.testing.assert_close(feature_map(x), expected)


def test_learned_map_has_the_papers_parameters():
    count = sum(p.numel() for p in create_feature_map("learned", 32).parameters())
    assert count == 32 * 32 + 64 * 32 + 32


@pytest.mark.parametrize("name", ["learned", "learned-random-w1", "rfa"])
def test_the_length_of_the_input_does_not_matter_by_default(name, x):
    feature_map = make(name).eval()
    torch.testing.assert_close(feature_map(x), feature_map(50 * x), atol=1e-5, rtol=0)


def test_scalings_set_the_length_of_the_input(x):
    lengths = {
        scaling: make("learned", scaling=scaling).scale(x).norm(dim=-1)
        for scaling in ("none", "scaled", "unit", "unit-scaled")
    }
    torch.testing.assert_close(lengths["none"], x.norm(dim=-1))
    torch.testing.assert_close(lengths["scaled"], x.norm(dim=-1) * 8**-0.25)
    ones = torch.ones_like(lengths["unit"])
    torch.testing.assert_close(lengths["unit"], ones, rtol=1e-5, atol=0)
    torch.testing.assert_close(lengths["unit-scaled"], 8**0.25 * ones, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_tokens_stay_finite_with_gradients_of_modest_size(name, dtype):
    feature_map = create_feature_map(name, 8, num_heads=2).to(dtype).eval()
    x = torch.zeros(1, 3, 3, 2, 8, dtype=dtype, requires_grad=True)
    phi_q, phi_k = feature_map(x, x)
    assert phi_q.isfinite().all() and phi_k.isfinite().all()
    (grad,) = torch.autograd.grad(phi_q.sum() + phi_k.sum(), x)
    assert grad.isfinite().all() and grad.abs().max() < 1e4


@pytest.mark.parametrize("name", RANDOM)
def test_random_maps_are_redrawn_in_training_and_fixed_in_evaluation(name, x):
    feature_map = make(name)
    assert not torch.equal(feature_map(x), feature_map(x))
    feature_map.eval()
    assert torch.equal(feature_map(x), feature_map(x))


@pytest.mark.parametrize("name", RANDOM)
def test_queries_and_keys_share_a_draw(name, x):
    feature_map = make(name)
    phi_q, _ = feature_map(x, x)
    kept = feature_map.projection.clone()
    feature_map.eval()
    torch.testing.assert_close(phi_q, feature_map(x))
    assert torch.equal(kept, feature_map.projection)


@pytest.mark.parametrize("name", RANDOM)
def test_the_draw_travels_in_the_state_dict(name, x):
    source, target = make(name), make(name)
    source(x)
    assert not torch.equal(source.projection, target.projection)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.eval()(x), target.eval()(x))


@pytest.mark.parametrize("name", RANDOM)
def test_random_maps_survive_two_calls_before_backward(name, x):
    feature_map = make(name)
    leaf = x.clone().requires_grad_()
    (feature_map(leaf).sum() + feature_map(leaf).sum()).backward()
    assert leaf.grad.isfinite().all()


def test_rfa_estimates_the_gaussian_kernel(x):
    torch.manual_seed(0)
    feature_map = create_feature_map("rfa", 8, num_features=40_000).double()
    a, b = x[0, 0, 0, 0], x[1, 0, 0, 0]
    phi_a, phi_b = feature_map(a[None], b[None])
    a, b = a / a.norm(), b / b.norm()
    kernel = math.exp(-float((a - b).square().sum()) / 2)
    assert abs(float((phi_a * phi_b).sum()) - kernel) < 0.02


def test_performer_estimates_the_exponential_kernel(x):
    torch.manual_seed(0)
    feature_map = create_feature_map("performer", 8, num_features=80_000, scaling="none").double()
    a, b = 0.3 * x[0, 0, 0, 0], 0.3 * x[1, 0, 0, 0]
    draw = feature_map.sample()
    exponents = [draw @ t - t.square().sum() / 2 for t in (a, b)]
    estimate = float((exponents[0].exp() * exponents[1].exp()).mean())
    assert abs(estimate / math.exp(float(a @ b)) - 1) < 0.02
    phi = feature_map.features(a[None, None, None], draw, is_key=True)[0, 0, 0]
    shape = (phi * 80_000**0.5 - 1e-4).log() - exponents[0]  # equal but for one constant
    usable = phi * 80_000**0.5 > 0.01
    torch.testing.assert_close(
        shape[usable], shape[usable].max().expand(usable.sum()), atol=1e-6, rtol=0
    )


def test_performer_draws_orthogonal_rows():
    draw = create_feature_map("performer", 8, num_features=8).double().sample()
    gram = draw @ draw.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-5, rtol=0)


def test_performer_subtracts_the_maximum_of_its_projections_alone(x):
    feature_map = make("performer").eval()
    phi_q, phi_k = feature_map(x, x)
    scaled = x * 8**-0.25
    projected = scaled @ feature_map.projection.T  # (B, H, W, N, M)
    half_square = scaled.square().sum(-1, keepdim=True) / 2
    # Of a query over features; of keys over tokens, too, but not over heads or images.
    for phi, over in ((phi_q, -1), (phi_k, (1, 2, 4))):
        largest = projected.amax(over, keepdim=True)
        expected = ((projected - half_square - largest).exp() + 1e-4) / 8**0.5
        torch.testing.assert_close(phi, expected)


def test_hedgehog_is_as_wide_as_the_head_unless_told():
    widths = [create_feature_map("hedgehog", width).num_features for width in (1, 7, 32)]
    assert widths == [2, 8, 32]
    wide = create_feature_map("hedgehog", 8, num_features=16)  # as in its paper
    torch.testing.assert_close(wide.weight[0], 8**-0.25 * torch.eye(8))


def test_dpfp_multiplies_neighbours():
    feature_map = create_feature_map("dpfp", 2)
    x = torch.tensor([[2.0, -3.0]])
    # r = [2, 0, 0, 3], roll(r, 1) = [3, 2, 0, 0]
    assert feature_map(x).tolist() == [[6.0, 0.0, 0.0, 0.0]]
    assert create_feature_map("dpfp", 32).num_features == 64


def test_elementwise_maps():
    x = torch.tensor([[-1.0, 2.0]])
    torch.testing.assert_close(create_feature_map("elu", 2)(x), torch.tensor([[math.exp(-1), 3.0]]))
    assert create_feature_map("relu", 2)(x).tolist() == [[0.0, 2.0]]


def test_t2r_has_a_matrix_for_each_head(x):
    feature_map = make("t2r")
    expected = (x[..., 1, :] @ feature_map.weight[1].T + feature_map.bias[1]).relu()
    torch.testing.assert_close(feature_map(x)[..., 1, :], expected)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_maps_keep_their_type(name):
    feature_map = create_feature_map(name, 8, num_heads=2).bfloat16()
    phi_q, phi_k = feature_map(*torch.randn(2, 1, 3, 3, 2, 8, dtype=torch.bfloat16))
    assert phi_q.dtype == phi_k.dtype == torch.bfloat16


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="must be one of learned, .*; got 'learnt'"):
        create_feature_map("learnt", 32)
    with pytest.raises(ValueError, match="scaling must be one of"):
        create_feature_map("learned", 32, scaling="big")
    with pytest.raises(ValueError, match="multiple of 64; got num_features=32"):
        create_feature_map("dpfp", 32, num_features=32)
    with pytest.raises(ValueError, match="must be even; got num_features=3"):
        create_feature_map("rfa", 32, num_features=3)
    with pytest.raises(ValueError, match="keeps the width"):
        create_feature_map("elu", 32, num_features=16)
    with pytest.raises(ValueError, match="must be a whole number ≥ 1; got"):
        create_feature_map("learned", 0)
    with pytest.raises(ValueError, match="must be a whole number ≥ 1; got"):
        create_feature_map("learned", 32, num_features=0)
    with pytest.raises(ValueError, match="only option of a feature map is scaling; got width"):
        create_feature_map("learned", 32, width=3)
