"""Random inputs of the operator, and how results are compared."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ripple_attention import Partition

GRIDS = [(1, 1), (1, 7), (7, 5), (14, 14), (33, 20)]
MASKS = ["none", "random", "image", "rows"]


def make_inputs(
    grid: tuple[int, int],
    partition: Partition,
    *,
    batch: int = 2,
    heads: int = 2,
    features: int = 5,
    value_dim: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, weights: features as after a ReLU, some of them dead, of one query all."""
    generator = torch.Generator().manual_seed(seed)

    def randn(channels: int) -> Tensor:
        return torch.randn(batch, *grid, heads, channels, generator=generator, dtype=torch.float64)

    q, k = randn(features).relu(), randn(features).relu()
    q[..., 0], k[..., 1] = 0, 0
    q[0, 0, 0, 0] = 0  # a query without a feature: its denominator is zero
    weights = randn(partition.num_groups).softmax(-1)
    return tuple(x.to(dtype) for x in (q, k, randn(value_dim), weights))


def make_mask(kind: str, grid: tuple[int, int], batch: int = 2) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.rand(batch, *grid, generator=torch.Generator().manual_seed(1)) < 0.4
    if kind == "image":
        mask[0] = True  # nothing to see in the first image
    if kind == "rows":
        mask[:, grid[0] // 2 :] = True  # as a detector pads: whole rows and columns
        mask[:, :, (grid[1] + 1) // 2 :] = True
    return mask


def gradients(function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and its gradients under a fixed random upstream gradient."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*leaves)
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return out.detach(), torch.autograd.grad(out, leaves, upstream)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ in float64; absolute where the expected norm is below 1.

    (A gradient may be zero but for rounding, as that of the only token's query.)
    """
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp(min=1))


def assert_sees_all_that_lives(run, group: int, device: str = "cpu") -> None:
    """On a large grid in float32, a query gives zero where its group holds dead keys alone.

    Elsewhere it does not, though the group may add up to far less than the sums that an algorithm
    takes it for the difference of.

    Args:
        run: Of a partition, gives the operator.
        group: The one with all the weight: the token itself, those near it, or the rest.
        device: Where it runs.
    """
    partition, grid = Partition((0, 24)), (128, 128)
    q, k, v, weights = make_inputs(grid, partition, batch=1, heads=1, features=8)
    q, k = (x.mul(16).round().div(16) for x in (q, k))  # all sums are exact in float64
    k[:, 20 if group == 2 else 42 :] = 0
    k[:, :, 20 if group == 2 else 128 :] = 0
    keys = k[:, :, :, 0].permute(0, 3, 1, 2)
    box = F.avg_pool2d(keys, 49, 1, 24, divisor_override=1)
    ring = (keys, box - keys, keys.sum((2, 3), keepdim=True) - box)[group]
    seen = (q[0, :, :, 0] * ring[0].permute(1, 2, 0)).sum(-1)
    weights.zero_()[..., group] = 1
    inputs = (x.float().to(device) for x in (q, k, torch.ones_like(v), weights))
    out = run(partition)(*inputs)[0, :, :, 0, 0].cpu()
    assert (seen == 0).any() and (out[seen == 0] == 0).all()
    assert (out[seen > 0.01] - 1).abs().max() < 0.05


def assert_padding_is_ignored(layer, x: Tensor) -> Tensor:
    """What stands in padded tokens must not reach the others; returns the mask it tried."""
    mask = torch.zeros(x.shape[:3], dtype=torch.bool)
    mask[0, 4:], mask[1, :, 5:] = True, True
    changed = x.clone()
    changed[mask] = 100.0
    before = layer(x, key_padding_mask=mask)[~mask]
    assert relative_error(layer(changed, key_padding_mask=mask)[~mask], before) < 1e-12
    return mask


def assert_padding_alone_stays_finite(layer, x: Tensor) -> None:
    """An image that is all padding must give finite outputs and gradients."""
    mask = torch.zeros(x.shape[:3], dtype=torch.bool)
    mask[0] = True
    out = layer(x, key_padding_mask=mask)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def gradient_layouts(name: str, inputs: tuple[Tensor, ...], radii: list[int]) -> list[list[tuple]]:
    """Shapes, strides and types of an operator's gradients, and those compiled code expects."""
    forward = getattr(torch.ops.ripple_attention, name)
    backward = getattr(torch.ops.ripple_attention, f"{name}_backward")

    def layouts(*tensors: Tensor) -> list[tuple]:
        results = forward(*tensors, radii, 0.5)
        grads = backward(results[0], *tensors, *results, radii)
        return [(tuple(x.shape), x.stride(), x.dtype) for x in grads]

    fake = FakeTensorMode()
    with fake:
        expected = layouts(*(fake.from_tensor(x) for x in inputs))
    return [layouts(*inputs), expected]
