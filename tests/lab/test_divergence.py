"""The divergence of spatial weights from the fixed ones."""

import math

import pytest
import torch

from ripple_lab.divergence import divergence_from_fixed, jensen_shannon, uniform_divergence


def test_divergence_is_that_of_its_definition():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)

    def kullback(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x)

    for row, value in zip(p.tolist(), jensen_shannon(p, q).tolist(), strict=True):
        middle = [(a + b) / 2 for a, b in zip(row, q.tolist(), strict=True)]
        expected = (kullback(row, middle) + kullback(q.tolist(), middle)) / 2
        assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(jensen_shannon(p, q), jensen_shannon(q, p))
    with pytest.raises(ValueError, match=r"same groups.*got shapes \(3, 3\) and \(2,\)"):
        jensen_shannon(p, q[:2])


def test_fixed_weights_have_no_divergence_and_uniform_ones_that_of_the_line():
    fixed = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert float(divergence_from_fixed(fixed)) == pytest.approx(0, abs=1e-7)
    uniform = divergence_from_fixed(torch.full((2, 3, 5), 0.2, dtype=torch.bfloat16))
    torch.testing.assert_close(
        uniform, torch.full((2, 3), uniform_divergence(5)), atol=1e-3, rtol=0
    )
    assert uniform_divergence(2) == 0.0  # 1/2, 1/2
    assert 0 < uniform_divergence(3) < uniform_divergence(9) < math.log(2)
