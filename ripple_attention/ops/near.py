"""Near by softmax: a window of exp(q·k), and how it shares one denominator with what lies beyond.

    out_i = [Σ_near α_g e^{s q_i·k_j} v_j + c_i Σ_far α_g φq_i·φk_j v_j]  ÷  [the same, 1 for v_j]

The window gives its mean of the values and the logarithm of its sum, as flash attention does. So
two windows, or a window and prefix tokens, merge without a number that overflows; and any algorithm
for features takes the sum in units of c_i as one share more (`library.register`, "shared").
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, heads_first, parts, safe_divide
from ripple_attention.ops.export import by_head, gather, pair_weights, tile_grid, to_grid
from ripple_attention.ops.library import Operator
from ripple_attention.ops.tiled import _plan, _sum_by_group, _with_groups
from ripple_attention.partition import Partition

# Exponents are cut here: beyond, one share is lost in the other's rounding, even in float64.
LARGEST = 60.0


def window_by_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The window by its definition, all pairs of tokens, differentiable by autograd.

    Args:
        q, k: Queries and keys (B, H, W, N, D), not mapped.
        v: Values (B, H, W, N, E).
        weights: α ≥ 0 of the near groups (B, H, W, N, G').
        mask: Bool (B, H, W), True for padded keys.
        radii: The G' box radii of the near groups.
        scale: Factor on q·k.

    Returns:
        Σ α e^{s q·k} v ÷ Σ α e^{s q·k}, 0 where nothing is seen, (B, H, W, N, E); and the logarithm
        of the denominator, (B, H, W, N). Both float32 or better.
    """
    B, H, W, _, _ = v.shape
    groups = Partition(radii).pair_groups((H, W), v.device)
    hidden = (groups == len(radii)).expand(B, 1, -1, -1)
    if mask is not None:
        hidden = hidden | mask.flatten(1)[:, None, None, :]
    queries, keys, values, alpha = (heads_first(x).flatten(2, 3) for x in (q, k, v, weights))
    scores = scale * queries @ _spread(keys).mT
    out, log_sum = _softmax_sums(scores, _gather(alpha, groups), hidden, values)
    return out.transpose(1, 2).unflatten(1, (H, W)), log_sum.transpose(1, 2).unflatten(1, (H, W))


def window_export(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`window_by_pairs` for `torch.export`, by the tiles of `ops/export.py`."""
    tiles = tile_grid(v.shape[1], v.shape[2], Partition(radii), v.device)
    queries, keys, values, alpha = (by_head(x) for x in (q, _spread(k), v, weights))
    beyond = (tiles.groups == len(radii))[None]
    seen = gather(by_head(_seen(v, mask)), tiles.keys, tiles.inside).mT  # (B·N·tiles, 1, halo)
    nothing = torch.zeros_like(alpha[..., :1])
    near = pair_weights(gather(torch.cat([alpha, nothing], -1), tiles.queries), tiles.groups)
    scores = torch.bmm(gather(queries, tiles.queries), gather(keys, tiles.keys, tiles.inside).mT)
    halo = gather(values, tiles.keys, tiles.inside)
    out, log_sum = _softmax_sums(scale * scores, near, beyond | (seen == 0), halo)
    out, log_sum = tiles.untile(out), tiles.untile(log_sum.unsqueeze(-1))
    return to_grid(out, v), to_grid(log_sum, v).squeeze(-1)


class Prefix(NamedTuple):
    """Keys (B, P, N, ·), values (B, P, N, E) and mask (B, P), True for padded ones, of tokens that
    have no place on the grid. What is padded is 0.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


def prefix_by_softmax(
    q: Tensor, prefix: Prefix, weight: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """As a window, of prefix tokens, which all have one weight (B, H, W, N, 1)."""
    dtype = accumulation_dtype(q)
    queries, keys, values = (x.to(dtype) for x in (q, prefix.k, prefix.v))
    scores = scale * torch.einsum("bhwnd,bpnd->bhwnp", queries, _spread(keys))
    hidden = torch.zeros_like(scores[:1, :1, :1, :1], dtype=torch.bool)
    if prefix.mask is not None:
        hidden = prefix.mask[:, None, None, None]
    largest, pairs = _shifted(scores, weight.to(dtype).expand_as(scores), hidden)
    total = pairs.sum(-1, keepdim=True)
    out = safe_divide(torch.einsum("bhwnp,bpne->bhwne", pairs, values), total)
    return out, _log_sum(largest, total)


def prefix_by_features(q: Tensor, prefix: Prefix, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_p α φq·φk_p v_p and Σ_p α φq·φk_p over prefix tokens: (B, H, W, N, E) and (B, H, W, N)."""
    dtype = accumulation_dtype(q)
    queries, keys, values = (x.to(dtype) for x in (q, prefix.k, prefix.v))
    queries = weight.to(dtype) * queries
    state = torch.einsum("bpnm,bpne->bnme", keys, values)
    numerator = torch.einsum("bhwnm,bnme->bhwne", queries, state)
    return numerator, torch.einsum("bhwnm,bnm->bhwn", queries, keys.sum(1))


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two means with the logarithms of their sums → those of both together."""
    nothing = torch.finfo(one[1].dtype).min  # −inf has no differences
    logs = [_clamp(x[1], nothing) for x in (one, other)]
    log_sum = torch.logaddexp(*logs)
    out = sum(
        x[0] * (log - log_sum).exp().unsqueeze(-1)
        for x, log in zip((one, other), logs, strict=True)
    )
    return out, log_sum  # type: ignore[return-value]


def as_share(out: Tensor, log_sum: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """A mean and the logarithm of its sum → numerator and denominator, in units of e^log_scale."""
    whole = log_sum.masked_fill(log_sum == torch.inf, torch.nan)  # which would be cut to be finite
    exponent = _clamp(whole - log_scale, -LARGEST, LARGEST)
    total = exponent.exp().masked_fill(log_sum <= torch.finfo(log_sum.dtype).min, 0)
    return out * total.unsqueeze(-1), total


def window_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`window_by_pairs` by tiles of queries and their halos of keys, as in `ops/tiled.py`."""
    dtype = accumulation_dtype(v)
    out, log_sum = v.new_empty(v.shape, dtype=dtype), v.new_empty(v.shape[:-1], dtype=dtype)
    strip_list, budget = _plan(v, radii)
    seen = _seen(v, mask)
    for part in parts(v, 2 * max(strip.pairs for strip in strip_list), budget):
        heads = v[part].shape[3]
        padded_k, padded_v, padded_seen = (strip_list[0].pad_keys(x[part]) for x in (k, v, seen))
        padded_k = _spread(padded_k)
        for strip, groups in _with_groups(strip_list, Partition(radii), v.device):
            queries, alpha = (strip.query_tiles(x[part]) for x in (q, weights))
            hidden = (groups == len(radii)) | (strip.key_tiles(padded_seen).mT == 0)
            scores = scale * torch.bmm(queries, strip.key_tiles(padded_k).mT)
            values = strip.key_tiles(padded_v)
            result = _softmax_sums(scores, _gather(alpha, groups), hidden, values)
            out[part][:, strip.rows] = strip.untile_queries(result[0], heads)
            log = strip.untile_queries(result[1].unsqueeze(-1), heads)
            log_sum[part][:, strip.rows] = log.squeeze(-1)
    return out, log_sum


def window_backward(
    grad: Tensor,
    grad_log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `window_forward` for q, k, v and the weights, each in the type of its input.

    With P = α e^{s − log_sum}, the pair (i, j) pulls by t = ∂o_i·v_j − (∂o_i·o_i − ∂log_i): its
    score receives P t, its value P ∂o_i, its weight t P/α.
    """
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, weights)]
    strip_list, budget = _plan(v, radii)
    W, columns = v.shape[2], strip_list[0].padding
    seen = _seen(v, mask)
    offset = (grad_log - (grad * out).sum(-1)).unsqueeze(-1)
    for part in parts(v, 3 * max(strip.pairs for strip in strip_list), budget):
        B, heads = v[part].shape[0], v[part].shape[3]
        padded_k, padded_v, padded_seen = (strip_list[0].pad_keys(x[part]) for x in (k, v, seen))
        grad_k, grad_v = torch.zeros_like(padded_k), torch.zeros_like(padded_v)
        for strip, groups in _with_groups(strip_list, Partition(radii), v.device):
            queries, alpha, log, y, c = (
                strip.query_tiles(x[part])
                for x in (q, weights, log_sum.unsqueeze(-1), grad, offset)
            )
            keys, values = strip.key_tiles(padded_k), strip.key_tiles(padded_v)
            hidden = (groups == len(radii)) | (strip.key_tiles(padded_seen).mT == 0)
            scores = torch.bmm(queries, keys.mT).mul_(scale)
            pairs = _exp(scores - log).masked_fill_(hidden, 0)
            pull = torch.bmm(y, values.mT).add_(c).mul_(pairs)  # t e^{s − log_sum}
            by_group = _sum_by_group(pull, groups, len(radii))
            near = _gather(alpha, groups)
            pairs *= near
            pull *= near
            strip.add_key_tiles(grad_v, torch.bmm(pairs.mT, y))
            strip.add_key_tiles(grad_k, torch.bmm(pull.mT, queries).mul_(scale))
            grad_q = torch.bmm(pull, keys).mul_(scale)
            grads[0][part][:, strip.rows] = strip.untile_queries(grad_q, heads)
            grads[3][part][:, strip.rows] = strip.untile_queries(by_group, heads)
        for total, padded in ((grads[1], grad_k), (grads[2], grad_v)):
            inside = padded[:, :, columns : columns + W].unflatten(0, (B, heads))
            total[part].copy_(inside.permute(0, 2, 3, 1, 4))
    return grads[0], grads[1], grads[2], grads[3]


def register_window(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Makes the operators `ripple_attention::{name}` and `…_backward` of a window's two passes."""
    inputs = "Tensor q, Tensor k, Tensor v, Tensor weights, Tensor? mask"
    options = "int[] radii, float scale"

    def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        dtype = accumulation_dtype(v)
        return v.new_empty(v.shape, dtype=dtype), v.new_empty(v.shape[:-1], dtype=dtype)

    forward_op = Operator(name, f"({inputs}, {options}) -> (Tensor, Tensor)", forward, fake)
    backward_op = Operator(
        f"{name}_backward",
        f"(Tensor grad, Tensor grad_log, {inputs}, Tensor out, Tensor log_sum, {options}) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        backward,
        lambda grad, grad_log, *given: tuple(x.new_empty(x.shape) for x in given[:4]),
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.radii, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: Any, grad: Tensor, grad_log: Tensor) -> tuple[Tensor | None, ...]:
        grads = backward_op(grad, grad_log, *ctx.saved_tensors, ctx.radii, ctx.scale)
        return *grads, None, None, None

    forward_op.register_autograd(differentiate, setup_context, results=2)
    backward_op.refuse_derivatives('near="softmax"', "use implementation='naive'")
    return forward_op


def _softmax_sums(
    scores: Tensor, weights: Tensor, hidden: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores and weights (…, queries, keys), values (…, keys, E) → mean and logarithm of sums."""
    largest, pairs = _shifted(scores, weights, hidden)
    total = pairs.sum(-1, keepdim=True)
    return safe_divide(pairs @ values, total), _log_sum(largest, total)


def _shifted(scores: Tensor, weights: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score that weighs anything, and α e^{score − largest}."""
    largest = scores.detach().masked_fill(hidden | (weights == 0), -torch.inf)
    largest = largest.amax(-1, keepdim=True)
    return largest, weights * _exp(scores - largest).masked_fill(hidden, 0)


def _exp(exponent: Tensor) -> Tensor:
    """e^x. What is cut is the score of a key whose weight is 0, or next to nothing."""
    return _clamp(exponent, None, LARGEST).exp()


def _clamp(x: Tensor, least: float | None, most: float | None = None) -> Tensor:
    """As `torch.clamp`, for which the gradient of NaN would be 0."""
    return torch.where(x.isnan(), x, x.clamp(least, most))


def _spread(k: Tensor) -> Tensor:
    """k, with NaN for what is infinite: a score of −∞ would hide it."""
    return k + (k - k)


def _log_sum(largest: Tensor, total: Tensor) -> Tensor:
    empty = total == 0
    logarithm = torch.where(empty, 1, total).log() + largest
    return logarithm.masked_fill(empty, -torch.inf).squeeze(-1)


def _gather(weights: Tensor, groups: Tensor) -> Tensor:
    """The weight of each pair, 0 beyond the window: (…, queries, G'), (queries, keys)."""
    beyond = groups == weights.shape[-1]
    shape = (*weights.shape[:-2], *groups.shape)
    pairs = weights.gather(-1, groups.masked_fill(beyond, 0).expand(shape))
    return pairs.masked_fill(beyond, 0)


def _seen(v: Tensor, mask: Tensor | None) -> Tensor:
    """1 for each key that may be seen (B, H, W, N, 1); the padding of tiles is 0."""
    seen = torch.ones_like(v[..., :1]) if mask is None else ~mask[:, :, :, None, None]
    return seen.expand(*v.shape[:-1], 1)
