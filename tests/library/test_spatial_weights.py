import math

import pytest
import torch
from torch.distributions import StickBreakingTransform

from ripple_attention import SpatialWeights, fixed_weights, halt, halt_group, stick_breaking

KINDS = ["stick-breaking", "fixed", "softmax", "truncated"]


def test_zero_logits_give_uniform_balanced_weights():
    weights = stick_breaking(torch.zeros(2, 4, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.full((2, 5), 0.2, dtype=torch.float64))


def test_zero_logits_give_halves_without_balance():
    weights = stick_breaking(torch.zeros(4, dtype=torch.float64), balanced=False)
    expected = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)


def test_balanced_sticks_are_pytorchs():
    logits = torch.randn(3, 6, dtype=torch.float64)
    expected = StickBreakingTransform()(logits)
    torch.testing.assert_close(stick_breaking(logits), expected, rtol=1e-12, atol=0)


def test_sticks_follow_their_definition():
    logits = torch.randn(5, dtype=torch.float64)
    left, expected = 1.0, []
    for g, logit in enumerate(logits.tolist()):
        stick = 1 / (1 + (5 - g) * math.exp(-logit))
        expected.append(stick * left)
        left *= 1 - stick
    torch.testing.assert_close(stick_breaking(logits).tolist(), [*expected, left])


def test_the_rest_keeps_weight_where_the_printed_balance_would_leave_none():
    # Counting r from 1, the paper's last stick is 1/[1 + 0·e^(−o)] = 1 and the rest gets nothing.
    assert stick_breaking(torch.randn(100, 4))[:, -1].min() > 0


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]], requires_grad=True)
    weights = stick_breaking(logits)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    (grad,) = torch.autograd.grad(weights[:, 1].sum(), logits)
    assert grad.isfinite().all()


def test_halting_shares_what_is_left():
    weights = torch.tensor([0.7, 0.2999, 0.00006, 0.00004], dtype=torch.float64)
    assert halt_group(weights, 0.001) == 2
    halted = halt(weights, 0.001)
    expected = torch.tensor([0.7, 0.2999, 0.00005, 0.00005], dtype=torch.float64)
    torch.testing.assert_close(halted, expected)


def test_the_group_that_used_up_the_stick_keeps_its_weight():
    # As printed, the paper would merge group 0 as well and turn this query uniform.
    weights = torch.tensor([0.9995, 0.0002, 0.0003], dtype=torch.float64)
    assert halt(weights, 0.001)[0] == 0.9995
    assert halt_group(weights, 0.001, tail="printed") == 0
    torch.testing.assert_close(
        halt(weights, 0.001, tail="printed"), torch.full((3,), 1 / 4, dtype=torch.float64)
    )


def test_printed_halting_is_the_papers_formula():
    weights = torch.tensor([0.6, 0.3995, 0.0003, 0.0002], dtype=torch.float64)
    R, r_hat = 3, 1  # 1 − 0.6 − 0.3995 < τ: it halts at group 1, with groups 0 … R
    expected = [0.6] + [(1 - 0.6) / (R - r_hat + 2)] * 3
    torch.testing.assert_close(halt(weights, 0.001, tail="printed").tolist(), expected)


def test_weights_far_from_the_threshold_do_not_halt():
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25])
    assert halt_group(weights, 0.001) == 4
    assert torch.equal(halt(weights, 0.001), weights)


def test_a_threshold_above_everything_makes_weights_uniform():
    weights = torch.tensor([0.5, 0.3, 0.2])
    assert halt_group(weights, 1.0) == 1  # all of the stick is left before group 0: 1 < 1 is false
    torch.testing.assert_close(halt(weights, 1.0), torch.tensor([0.5, 0.25, 0.25]))
    assert (halt_group(torch.rand(1000, 7).softmax(-1), 1.0) == 1).all()  # whatever they round to


@pytest.mark.parametrize("balanced", [True, False])
def test_stick_breaking_passes_gradcheck(balanced):
    logits = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stick_breaking(x, balanced), logits)


@pytest.mark.parametrize("tail", ["share", "printed"])
def test_halting_passes_gradcheck(tail):
    logits = torch.tensor([[2.0, 6, -1, 1], [8, 0, 0, 0]], dtype=torch.float64, requires_grad=True)
    halts = lambda x: halt(stick_breaking(x), 0.05, tail)
    assert (halt_group(stick_breaking(logits), 0.05, tail) < 5).all()
    assert torch.autograd.gradcheck(halts, logits)


def test_fixed_weights_are_halves_and_the_remainder():
    torch.testing.assert_close(
        fixed_weights(5), torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_weights_of_its_shape(kind):
    torch.manual_seed(0)
    module = SpatialWeights(8, num_heads=3, num_groups=5, kind=kind).double()
    values = torch.randn(2, 4, 6, 3, 8, dtype=torch.float64)
    weights = module(values)
    assert weights.shape == (2, 4, 6, 3, 5)
    assert (weights >= 0).all()
    total = weights.sum(-1)
    if kind == "truncated":
        assert (weights[..., -1] == 0).all()
        assert (total < 1).all()
    else:
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("kind", ["stick-breaking", "softmax", "truncated"])
def test_spatial_weights_pass_gradcheck(kind):
    torch.manual_seed(0)
    module = SpatialWeights(3, num_heads=2, num_groups=4, kind=kind).double()
    values = torch.randn(1, 2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    parameters = dict(module.named_parameters())

    def run(v, *tensors):
        return torch.func.functional_call(module, dict(zip(parameters, tensors, strict=True)), v)

    assert torch.autograd.gradcheck(run, (values, *parameters.values()))


def test_logits_are_the_projected_value_against_each_heads_embeddings():
    module = SpatialWeights(4, num_heads=2, num_groups=3, halt_threshold=0.0).double()
    value = torch.randn(1, 1, 1, 2, 4, dtype=torch.float64)
    for head in range(2):
        projected = module.proj.weight @ value[0, 0, 0, head] + module.proj.bias
        logits = module.embedding[head] @ projected
        torch.testing.assert_close(module(value)[0, 0, 0, head], stick_breaking(logits))


def test_parameters_match_the_papers_count():
    module = SpatialWeights(32, num_heads=6, num_groups=5)
    assert sum(p.numel() for p in module.parameters()) == 32 * 32 + 32 + 6 * 4 * 32  # about 1.8 k
    assert not list(SpatialWeights(32, 6, 5, kind="fixed").parameters())


def test_half_precision_values_give_float32_weights():
    module = SpatialWeights(8, num_heads=2, num_groups=5).bfloat16()
    assert module(torch.randn(1, 2, 2, 2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="must be one of .*stick-breaking.*; got 'sticks'"):
        SpatialWeights(8, 2, 5, kind="sticks")
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]; got threshold=-1"):
        SpatialWeights(8, 2, 5, halt_threshold=-1)
    with pytest.raises(ValueError, match="tail must be one of"):
        halt(torch.ones(3) / 3, 0.1, tail="cut")
    with pytest.raises(ValueError, match="must be floating-point"):
        stick_breaking(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one logit for each group"):
        stick_breaking(torch.zeros(2, 0))
