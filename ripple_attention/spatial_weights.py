"""Spatial weights: how much each ring around a query counts, decided by the query's own value."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ripple_attention.checks import (
    REMEDY,
    check_choice,
    check_count,
    check_dtype,
    check_flag,
    check_floats,
    describe,
    holds_floats,
    shorten,
)
from ripple_attention.fusion import WeightSpec, are_plain, runs_own_code, stands_for
from ripple_attention.ops.common import autocast_unites
from ripple_attention.partition import MOST_GROUPS

WeightKind = Literal["stick-breaking", "fixed", "softmax", "truncated"]
Tail = Literal["share", "printed"]


def stick_breaking(stick_logits: Tensor, balanced: bool = True) -> Tensor:
    """Breaks a stick of length 1 into one weight for each group, the nearest first.

        s_g = σ(o_g − log(G−1−g)),    α_g = s_g ∏_{g'<g} (1 − s_g'),    the rest takes what is left

    A nearer group *may* take more; its logit decides how much it takes.

    Args:
        stick_logits: o (…, G−1), one logit for each group but the rest.
        balanced: Subtract log(G−1−g), so that zero logits give uniform weights. Without it zero
            logits give 1/2, 1/4, 1/8, …

    Returns:
        Weights (…, G), at least 0, that add up to 1.

    >>> stick_breaking(torch.zeros(3))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> stick_breaking(torch.zeros(3), balanced=False)
    tensor([0.5000, 0.2500, 0.1250, 0.1250])
    """
    check_floats("stick_logits", stick_logits, "(…, G−1), one logit for each group but the last")
    sticks = stick_logits.shape[-1]
    if check_flag("balanced", balanced):
        dtype, device = stick_logits.dtype, stick_logits.device
        stick_logits = stick_logits - torch.arange(sticks, 0, -1, dtype=dtype, device=device).log()
    log_left = F.logsigmoid(-stick_logits).cumsum(-1)  # log of the stick left after each break
    log_before = F.pad(log_left, (1, 0))
    return (log_before + F.pad(F.logsigmoid(stick_logits), (0, 1))).exp()


def fixed_weights(num_groups: int) -> Tensor:
    """Weights without parameters: 1/2, 1/4, 1/8, …, and the remainder for the rest.

    >>> fixed_weights(4)
    tensor([0.5000, 0.2500, 0.1250, 0.1250])
    """
    check_count("num_groups", num_groups, 2, MOST_GROUPS)
    return stick_breaking(torch.zeros(num_groups - 1), balanced=False)


def halt_group(weights: Tensor, threshold: float, tail: Tail = "share") -> Tensor:
    """Where a ripple halts: the first group before which less than `threshold` is left.

    Args:
        weights: (…, G), adding up to 1.
        threshold: τ in [0, 1].
        tail: "share" as above; "printed" as in the paper: the first *after* which less is left.

    Returns:
        int64 (…), in 0 … G, where G means that it does not halt.
    """
    _check_halting(threshold, tail)
    check_floats("weights", weights, "(…, G), one weight for each group")
    left = _left_before(weights)  # (…, G), never growing from group to group
    if tail == "printed":
        return (F.pad(left[..., 1:], (0, 1)) >= threshold).sum(-1)
    return (left >= threshold).sum(-1).clamp(min=1)  # before group 0 the stick is whole


def halt(weights: Tensor, threshold: float, tail: Tail = "share") -> Tensor:
    """Merges the groups from the halting group on, which then share what is left of the stick.

        α_g = (1 − Σ_{g'<r̂} α_g') / (G − r̂)    for g ≥ r̂

    The merged groups together weigh less than `threshold`. r̂ is an index and has no gradient.

    Args:
        weights: (…, G), adding up to 1.
        threshold: τ in [0, 1]; 0 changes nothing.
        tail: "share" divides by the number of merged groups, so that the weights add up to 1;
            "printed" follows both of the paper's formulas to the letter: it halts one group
            earlier, merges that group too, and divides by one more than there are. (It halts at the
            last group at the latest, and then halves its weight.)

    Returns:
        (…, G).
    """
    halted_at = halt_group(weights, threshold, tail).unsqueeze(-1)  # (…, 1)
    group = torch.arange(weights.shape[-1], device=weights.device)
    merged = group >= halted_at
    left = (weights * merged).sum(-1, keepdim=True)
    count = weights.shape[-1] - halted_at + (1 if tail == "printed" else 0)
    return torch.where(merged, left / count.clamp(min=1), weights)


class SpatialWeights(nn.Module):
    """Spatial weights from values: o_g = ⟨P v + p, e_{n,g}⟩, broken as a stick and halted.

    The projection is shared by the heads; each head and group has an embedding of its own.

    Args:
        value_dim: E, the width of a value.
        num_heads: How many heads, N.
        num_groups: How many groups, G.
        kind: "stick-breaking"; "truncated", the same with the rest at 0 (local only); "softmax"
            over G logits, which does not prefer the near; "fixed", 1/2, 1/4, … without parameters.
        balanced: As in `stick_breaking`.
        halt_threshold: τ of `halt`, for the two kinds that break sticks.
        tail: As in `halt`.
        device, dtype: Of the parameters, as in PyTorch's layers.
    """

    weights: Tensor

    def __init__(
        self,
        value_dim: int,
        num_heads: int,
        num_groups: int,
        kind: WeightKind = "stick-breaking",
        *,
        balanced: bool = True,
        halt_threshold: float = 0.001,
        tail: Tail = "share",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_choice("the kind of spatial weights", kind, get_args(WeightKind))
        _check_halting(halt_threshold, tail)
        check_flag("balanced", balanced)
        check_dtype(dtype)
        self.value_dim = check_count("value_dim", value_dim)
        self.num_heads = check_count("num_heads", num_heads)
        check_count("num_groups", num_groups, 2, MOST_GROUPS)  # a ring and the rest
        self.kind = kind
        self.balanced = balanced
        self.halt_threshold = halt_threshold
        self.tail: Tail = tail
        self.num_groups = num_groups
        if kind == "fixed":
            weights = fixed_weights(num_groups).to(device=device, dtype=dtype)
            self.register_buffer("weights", weights)
        else:
            num_logits = num_groups if kind == "softmax" else num_groups - 1
            self.proj = nn.Linear(value_dim, value_dim, device=device, dtype=dtype)
            shape = (num_heads, num_logits, value_dim)
            self.embedding = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            nn.init.trunc_normal_(self.embedding, std=0.02)

    def forward(self, v: Tensor) -> Tensor:
        """Values (B, H, W, N, E) → weights (B, H, W, N, G), in float32 or better."""
        if not holds_floats(v) or v.shape[-2:] != (self.num_heads, self.value_dim):
            raise ValueError(
                f"spatial weights are made of values (…, N, E), floats, with N={self.num_heads} "
                f"heads and E={self.value_dim}; got {describe(v)}. {REMEDY}"
            )
        own = self.weights if self.kind == "fixed" else self.embedding
        if v.device != own.device:
            raise ValueError(
                "values must be on the device of the spatial weights' parameters; got "
                f"{str(v.device)=} and {str(own.device)=}. Move one of them with .to(...)."
            )
        plain = self.kind != "fixed" and runs_own_code(self.proj, nn.Linear)
        if plain and v.dtype != own.dtype and not autocast_unites(own, v):
            raise ValueError(
                "values must have the type of the spatial weights' parameters, unless autocast is "
                f"on; got {v.dtype=} and {own.dtype=}. Convert one of them with .to(...)."
            )
        dtype = torch.promote_types(v.dtype, torch.float32)
        if self.kind == "fixed":
            return own.to(dtype).expand(*v.shape[:-1], -1)
        logits = torch.einsum("...ne,nge->...ng", self.proj(v), own).to(dtype)
        if self.kind == "softmax":
            return logits.softmax(-1)
        weights = stick_breaking(logits, self.balanced)
        weights = halt(weights, self.halt_threshold, self.tail)
        if self.kind == "truncated":
            weights = F.pad(weights[..., :-1], (0, 1))
        return weights

    def _takes(self, v: Tensor) -> bool:
        """Whether parameters of the module's own kind take these values."""
        own = self.embedding
        if v.shape[-2:] != (self.num_heads, self.value_dim) or v.device != own.device:
            return False
        return v.dtype == own.dtype or autocast_unites(own, v)

    def fused_spec(self) -> WeightSpec | None:
        """What a kernel may compute in place of this module, or None."""
        if self.kind == "fixed" or (self.kind != "softmax" and self.tail != "share"):
            return None
        proj = self.proj
        if not (runs_own_code(self, SpatialWeights) and runs_own_code(proj, nn.Linear)):
            return None
        weight, bias, embedding = proj.weight, proj.bias, self.embedding
        if not are_plain(weight, bias, embedding) or bias is None:
            return None
        E, threshold = self.value_dim, self.halt_threshold
        if not (weight.shape == (E, E) and bias.shape == (E,)):
            return None
        shape = embedding.shape
        if not (len(shape) == 3 and shape[0] == self.num_heads and shape[2] == E):
            return None
        if not weight.dtype == bias.dtype == embedding.dtype:
            return None
        sticks, truncated = self.kind != "softmax", self.kind == "truncated"
        if sticks and not (type(self.balanced) is bool and _is_threshold(threshold)):
            return None
        return WeightSpec(
            weight,
            bias,
            embedding,
            sticks,
            sticks and self.balanced,
            truncated,
            threshold,
        )

    def extra_repr(self) -> str:
        return f"{self.num_groups} groups, kind={self.kind!r}, halt_threshold={self.halt_threshold}"


def _left_before(weights: Tensor) -> Tensor:
    """The stick left before each group, summed from the far end: never negative by rounding."""
    return weights.flip(-1).cumsum(-1).flip(-1)


def _is_threshold(x: float) -> bool:
    number = isinstance(x, int | float) and not isinstance(x, bool)
    return number and 0 <= x <= 1


def _check_halting(threshold: float, tail: str) -> None:
    if not _is_threshold(threshold):
        raise ValueError(
            f"the halting threshold must lie in [0, 1]; got threshold={shorten(threshold)}. "
            "0 never halts."
        )
    check_choice("tail", tail, get_args(Tail))


stands_for(SpatialWeights)
