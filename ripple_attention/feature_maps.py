"""Feature maps φ: from D channels to M features whose products replace the exponential.

Inputs are (…, N, D), heads before channels. Every map takes queries and keys together, so that a
random map uses one draw for both. `device` and `dtype` are those of the parameters, as in PyTorch's
layers.
"""

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ripple_attention.checks import (
    REMEDY,
    check_choice,
    check_count,
    check_dtype,
    describe,
    holds_floats,
)
from ripple_attention.fusion import FeatureSpec, are_plain, runs_own_code, stands_for
from ripple_attention.ops.common import accumulation_dtype, autocast_unites, without_autocast

Scaling = Literal["none", "scaled", "unit", "unit-scaled"]
SCALINGS = get_args(Scaling)


class FeatureMap(nn.Module):
    """The base of all maps: scales inputs, and maps queries and keys with one draw.

    Args:
        head_dim: Width of a query or key, D.
        num_features: M, the width of φ(x).
        scaling: How x is scaled first: "none"; "scaled", by D^(−1/4); "unit", to length 1;
            "unit-scaled", to length D^(1/4). Without a bound on x the sines of a `learned` map
            swing ever faster as x grows, and training can diverge.
    """

    num_heads: int | None = None  # of maps with parameters of their own for each head

    def __init__(self, head_dim: int, num_features: int, scaling: Scaling):
        super().__init__()
        check_choice("scaling", scaling, SCALINGS)
        self.head_dim = check_count("head_dim", head_dim)
        self.num_features = check_count("num_features", num_features)
        self.scaling = scaling

    def forward(self, q: Tensor, k: Tensor | None = None) -> Any:
        """φ(q), or the pair (φ(q), φ(k)) if both are given: (…, N, D) → (…, N, M)."""
        if not self._takes(q) or not (k is None or (self._takes(k) and k.device == q.device)):
            raise ValueError(
                f"a feature map takes queries and keys (…, N, {self.head_dim}), floats of the type "
                f"of its parameters, on their device, with N={self.num_heads or 'any'} heads; got "
                f"{describe(q)}" + ("" if k is None else f" and {describe(k)}") + f". {REMEDY}"
            )
        draw = self.draw()
        phi_q = self.features(self.scale(q), draw, is_key=False)
        if k is None:
            return phi_q
        return phi_q, self.features(self.scale(k), draw, is_key=True)

    def _takes(self, x: Any) -> bool:
        """Whether x has the channels, heads, type and device that the map is made for."""
        if not holds_floats(x) or x.dim() < 2 or x.shape[-1] != self.head_dim:
            return False
        if self.num_heads is not None and x.shape[-2] != self.num_heads:
            return False
        for own in (*self._parameters.values(), *self._buffers.values()):
            if own is not None and own.device != x.device:
                return False
        own = self._matrix()
        return own is None or own.dtype == x.dtype or autocast_unites(own, x)

    def _matrix(self) -> Tensor | None:
        """A matrix that multiplies x uncast, so both must have one type; None if there is none."""
        return None

    def scale(self, x: Tensor) -> Tensor:
        """x scaled as `scaling` says, computed in float32 or better."""
        if self.scaling == "none":
            return x
        if self.scaling == "scaled":
            return x * self.head_dim**-0.25
        check_choice("scaling", self.scaling, SCALINGS)
        with without_autocast(x):
            wide = x.to(accumulation_dtype(x))
            mean_square = wide.square().mean(-1, keepdim=True)
            length = 1.0 if self.scaling == "unit" else self.head_dim**0.25
            # Not exactly x/‖x‖: the gradient of a zero token must stay small.
            scale = length * self.head_dim**-0.5 * (mean_square + 1e-6).rsqrt()
            return (wide * scale).to(x.dtype)

    def draw(self) -> Tensor | None:
        """The random part of the map for one call; None for a map without one."""
        return None

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        raise TypeError(
            f"a feature map defines features(x, draw, is_key=…); got {type(self).__name__}, which "
            "does not. Derive a class that does, or take one of FEATURE_MAPS."
        )

    def fused_spec(self) -> FeatureSpec | None:
        """What a kernel may compute in place of this module, or None."""
        return None

    def _is_as_written(self, kind: type) -> bool:
        return runs_own_code(self, kind) and self.scaling in SCALINGS

    def extra_repr(self) -> str:
        return f"{self.head_dim} → {self.num_features}, scaling={self.scaling!r}"


class RandomFeatureMap(FeatureMap):
    """A map with a random matrix: drawn anew at each call in training, kept for evaluation.

    The last draw is the buffer `projection`, part of the state dict.
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        scaling: Scaling,
        num_rows: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(head_dim, num_features, scaling)
        check_dtype(dtype)
        empty = torch.empty(num_rows, head_dim, device=device, dtype=dtype)
        self.register_buffer("projection", empty)
        self.projection.copy_(self.sample())

    def draw(self) -> Tensor:
        if not self.training:
            return self.projection
        fresh = self.sample()
        with torch.no_grad():
            self.projection.copy_(fresh)
        return fresh

    def sample(self) -> Tensor:
        return torch.randn_like(self.projection)


def _sines(x: Tensor, matrix: Tensor) -> Tensor:
    """[sin(Wx); cos(Wx)] in the type of x, the angles in float32 or better even under autocast."""
    with without_autocast(x):
        dtype = accumulation_dtype(x)
        angles = x.to(dtype) @ matrix.to(dtype).mT
        return torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)


class Learned(FeatureMap):
    """The paper's map: φ(x) = ReLU(W₂ [sin(W₁x); cos(W₁x)] + b₂), shared by the heads.

    W₁ starts as standard Gaussian samples and is learned like the rest.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "unit",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        num_features = head_dim if num_features is None else num_features
        super().__init__(head_dim, num_features, scaling)
        check_dtype(dtype)
        w1 = torch.randn(head_dim, head_dim, device=device, dtype=dtype)
        self.w1 = nn.Parameter(w1)
        self.fc = nn.Linear(2 * head_dim, num_features, device=device, dtype=dtype)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        return F.relu(self.fc(_sines(x, self.w1)))

    def _matrix(self) -> Tensor | None:
        return self.fc.weight if type(self.fc) is nn.Linear else None

    def fused_spec(self) -> FeatureSpec | None:
        fc = self.fc
        if not (self._is_as_written(Learned) and runs_own_code(fc, nn.Linear)):
            return None
        M, D, w1, w2, b2 = self.num_features, self.head_dim, self.w1, fc.weight, fc.bias
        if not (are_plain(w1, w2, b2) and w1.shape == (D, D) and w2.shape == (M, 2 * D)):
            return None
        if b2 is not None and not (b2.shape == (M,) and b2.dtype == w2.dtype):
            return None
        return FeatureSpec("relu", self.scaling, M, w1, w2, b2)


class LearnedRandomW1(RandomFeatureMap):
    """The paper's map with W₁ random instead of learned."""

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "unit",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        num_features = head_dim if num_features is None else num_features
        super().__init__(head_dim, num_features, scaling, head_dim, device, dtype)
        self.fc = nn.Linear(2 * head_dim, num_features, device=device, dtype=dtype)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        assert draw is not None
        return F.relu(self.fc(_sines(x, draw)))

    def _matrix(self) -> Tensor | None:
        return self.fc.weight if type(self.fc) is nn.Linear else None


class T2R(FeatureMap):
    """φ(x) = ReLU(Wx + b) with a matrix for each head (Kasai et al., 2021)."""

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        num_heads: int = 1,
        scaling: Scaling = "none",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        num_features = head_dim if num_features is None else num_features
        super().__init__(head_dim, num_features, scaling)
        self.num_heads = check_count("num_heads", num_heads)
        check_dtype(dtype)
        bound = head_dim**-0.5
        weight = torch.empty(num_heads, num_features, head_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_empty(num_heads, num_features))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        return F.relu(torch.einsum("...nd,nmd->...nm", x, self.weight) + self.bias)

    def _matrix(self) -> Tensor | None:
        return self._parameters.get("weight")

    def fused_spec(self) -> FeatureSpec | None:
        weight, bias, shape = self.weight, self.bias, (self.num_heads, self.num_features)
        if not (self._is_as_written(T2R) and are_plain(weight, bias)):
            return None
        if not (weight.shape == (*shape, self.head_dim) and bias.shape == shape):
            return None
        if weight.dtype != bias.dtype:
            return None
        return FeatureSpec("relu", self.scaling, self.num_features, None, weight, bias)


class Hedgehog(FeatureMap):
    """φ(x) = softmax([Wx; −Wx]) with a matrix W for each head (Zhang et al., 2024).

    M = D unless given (an odd D is rounded up), as wide as the other maps; the paper's width is
    `num_features=2 * head_dim`. W starts as D^(−1/4) times orthogonal rows, or times the identity
    if M = 2D, so φ(q)·φ(k) is large where q·k is.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        num_heads: int = 1,
        scaling: Scaling = "none",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        check_count("head_dim", head_dim)
        num_features = head_dim + head_dim % 2 if num_features is None else num_features
        super().__init__(head_dim, num_features, scaling)
        self.num_heads = check_count("num_heads", num_heads)
        check_dtype(dtype)
        if num_features % 2 or num_features > 2 * head_dim:
            raise ValueError(
                "hedgehog pairs each feature with its negative: num_features must be even and at "
                f"most 2·head_dim; got {num_features=}, {head_dim=}. None is the map's own width."
            )
        # First in float32: PyTorch has no orthogonal initialisation for half precision.
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        weight = torch.empty(num_heads, num_features // 2, head_dim, device=device, dtype=wide)
        start = nn.init.eye_ if num_features == 2 * head_dim else nn.init.orthogonal_
        for matrix in weight:
            start(matrix).mul_(head_dim**-0.25)
        self.weight = nn.Parameter(weight.to(dtype or torch.get_default_dtype()))

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        z = torch.einsum("...nd,nmd->...nm", x, self.weight)
        dtype = accumulation_dtype(z)
        return torch.cat([z, -z], -1).to(dtype).softmax(-1).to(x.dtype)

    def _matrix(self) -> Tensor | None:
        return self._parameters.get("weight")

    def fused_spec(self) -> FeatureSpec | None:
        shape = (self.num_heads, self.num_features // 2, self.head_dim)
        if not (self._is_as_written(Hedgehog) and are_plain(self.weight)):
            return None
        if self.weight.shape != shape:
            return None
        both = torch.cat([self.weight, -self.weight], 1)
        return FeatureSpec("softmax", self.scaling, self.num_features, None, both)


class RFA(RandomFeatureMap):
    """Random Fourier features of unit vectors (Peng et al., 2021): [sin(Wx); cos(Wx)]/√(M/2).

    Products may be negative, and so may the denominator. Rows of W are standard Gaussian; we leave
    out the authors' learned σ, which scales their channels.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "unit",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        check_count("head_dim", head_dim)
        num_features = 2 * head_dim if num_features is None else num_features
        if check_count("num_features", num_features) % 2:
            raise ValueError(
                f"rfa pairs sines with cosines: num_features must be even; got {num_features=}. "
                "None is the map's own width."
            )
        super().__init__(head_dim, num_features, scaling, num_features // 2, device, dtype)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        assert draw is not None
        return _sines(x, draw) * (self.num_features / 2) ** -0.5


class Performer(RandomFeatureMap):
    """Positive orthogonal random features (FAVOR+, Choromanski et al., 2021).

        φ(x) = (exp(Wx − ‖x‖²/2 − c) + 10⁻⁴)/√M

    with c = max(Wx), as in the authors' code: over features for a query, over features and tokens
    for keys. Rows of W are orthogonal in blocks of D, with Gaussian lengths.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "scaled",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        num_features = head_dim if num_features is None else num_features
        super().__init__(head_dim, num_features, scaling, num_features, device, dtype)

    def sample(self) -> Tensor:
        like = self.projection
        num_blocks = math.ceil(self.num_features / self.head_dim)
        blocks = torch.randn(num_blocks, self.head_dim, self.head_dim, device=like.device)
        q, r = torch.linalg.qr(blocks)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform over rotations
        rows = q.flatten(0, 1)[: self.num_features]
        lengths = torch.randn(self.num_features, self.head_dim, device=like.device).norm(dim=1)
        return (rows * lengths[:, None]).to(like.dtype)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        assert draw is not None
        with without_autocast(x):
            dtype = accumulation_dtype(x)
            wide = x.to(dtype)
            projected = wide @ draw.to(dtype).mT
            tokens_too = tuple(range(1, x.dim() - 2)) if is_key else ()
            largest = projected.amax((*tokens_too, -1), keepdim=True).detach()
            exponent = projected - largest - wide.square().sum(-1, keepdim=True) / 2
            return ((exponent.exp() + 1e-4) * self.num_features**-0.5).to(x.dtype)


class DPFP(FeatureMap):
    """Products of neighbouring rectified channels (Schlag et al., 2021), without parameters.

    r = [ReLU(x); ReLU(−x)],    φ(x) = concat over i = 1 … ν of r ⊙ roll(r, i)
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "none",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        check_count("head_dim", head_dim)
        num_features = 2 * head_dim if num_features is None else num_features
        if check_count("num_features", num_features) % (2 * head_dim):
            raise ValueError(
                "dpfp has 2·head_dim features for each shift: num_features must be a multiple of "
                f"{2 * head_dim}; got {num_features=}. None is the map's own width."
            )
        super().__init__(head_dim, num_features, scaling)

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        r = torch.cat([F.relu(x), F.relu(-x)], -1)
        shifts = range(1, self.num_features // (2 * self.head_dim) + 1)
        return torch.cat([r * r.roll(shift, -1) for shift in shifts], -1)


class Elementwise(FeatureMap):
    """A map that changes each channel on its own: M = D."""

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scaling: Scaling = "none",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        if num_features is not None and check_count("num_features", num_features) != head_dim:
            raise ValueError(
                f"an elementwise map keeps the width: num_features must be {head_dim=} or None; "
                f"got {num_features=}. Other maps change it."
            )
        super().__init__(head_dim, head_dim, scaling)


class Elu(Elementwise):
    """φ(x) = elu(x) + 1 (Katharopoulos et al., 2020)."""

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        return F.elu(x) + 1

    def fused_spec(self) -> FeatureSpec | None:
        own = self._is_as_written(Elu) and self.num_features == self.head_dim
        return FeatureSpec("elu", self.scaling, self.head_dim) if own else None


class Relu(Elementwise):
    """φ(x) = ReLU(x)."""

    def features(self, x: Tensor, draw: Tensor | None, *, is_key: bool) -> Tensor:
        return F.relu(x)

    def fused_spec(self) -> FeatureSpec | None:
        own = self._is_as_written(Relu) and self.num_features == self.head_dim
        return FeatureSpec("relu", self.scaling, self.head_dim) if own else None


FEATURE_MAPS: dict[str, type[Any]] = {
    "learned": Learned,
    "learned-random-w1": LearnedRandomW1,
    "learned-no-fc": T2R,  # the paper says that its map without W₂ is T2R
    "t2r": T2R,
    "hedgehog": Hedgehog,
    "rfa": RFA,
    "performer": Performer,
    "dpfp": DPFP,
    "elu": Elu,
    "relu": Relu,
}
"""The feature maps by name."""


def create_feature_map(
    name: str, head_dim: int, *, num_heads: int = 1, num_features: int | None = None, **options: Any
) -> FeatureMap:
    """Makes a feature map by name.

    Args:
        name: One of `FEATURE_MAPS`.
        head_dim: Width of a query or key, D.
        num_heads: N, for maps that have parameters for each head.
        num_features: M; None for the map's own width.
        options: Further arguments of the map: `scaling`, `device` and `dtype`.

    >>> create_feature_map("learned", 32).num_features
    32
    """
    kind = FEATURE_MAPS[check_choice("the feature map", name, FEATURE_MAPS)]
    unknown = ", ".join(sorted(options.keys() - {"scaling", "device", "dtype"}))
    if unknown:
        raise ValueError(
            f"the only option of a feature map is scaling; got {unknown}. num_features and "
            "num_heads have arguments of their own, as have device and dtype."
        )
    check_count("num_heads", num_heads)
    if kind in (T2R, Hedgehog):
        options["num_heads"] = num_heads
    return kind(head_dim, num_features, **options)


stands_for(Learned, T2R, Hedgehog, Elu, Relu)
