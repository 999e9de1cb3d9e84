"""Features and spatial weights by kernels, against the modules that they stand for."""

from copy import deepcopy
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch

from inputs import relative_error
from kernels import HERE, assert_hardly_spills, compile_only, interpreted, needs_triton
from ripple_attention.dispatch import Problem, features_fuse
from ripple_attention.feature_maps import create_feature_map
from ripple_attention.spatial_weights import SpatialWeights

pytestmark = needs_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = ("qkv_features_kernel", "map_gradient_kernel", "weight_gradient_kernel")
NAMES = ("φ(q)", "φ(k)", "α", "∂qkv", "∂W₁", "∂A", "∂c", "∂P", "∂p", "∂e")


@dataclass(frozen=True)
class Case:
    grid: tuple[int, int] = (7, 5)
    head_dim: int = 16
    num_features: int = 16
    heads: int = 2
    groups: int = 5
    scaling: str = "unit"
    balanced: bool = True
    threshold: float = 0.3  # large: about half of the ripples halt early
    masked: bool = False
    batch: int = 2
    feature_map: str = "learned"
    kind: str = "stick-breaking"


CASES = [
    Case((9, 20), 32, 32, 2, batch=1),
    Case((9, 20), 24, 40, 1, 17, "unit-scaled", balanced=False, threshold=3e-5, masked=True),
    Case((7, 5), 16, 40, 2, 3, "scaled", threshold=0.7, masked=True),
    Case((7, 5), 32, 16, 1, 4, "none", balanced=False, threshold=0.001),
    Case((1, 7), 24, 16, 3, 2, threshold=1.0),
    Case((1, 1), 16, 32, 2, 6, "unit-scaled", threshold=0.0),
    Case((5, 6), 72, 40, 1, 9, masked=True),  # sines in two pieces
    Case((7, 5), 16, 24, 2, 4, "scaled", masked=True, feature_map="t2r", kind="truncated"),
    Case((7, 5), 20, 32, 2, 9, "none", feature_map="hedgehog", kind="softmax"),
    Case((7, 5), 24, 24, 3, 3, "unit", masked=True, feature_map="elu", kind="softmax"),
    Case((7, 5), 16, 16, 2, 18, "none", feature_map="relu", kind="truncated"),
]


class Inputs:
    """A qkv projection, modules with parameters that matter, gradients from above, and a mask."""

    def __init__(self, case, dtype):
        torch.manual_seed(0)
        B, N, D = case.batch, case.heads, case.head_dim
        self.case, self.dtype = case, dtype
        self.qkv = torch.randn(B, *case.grid, 3, N, D).to(dtype)
        if case.grid != (1, 1):
            self.qkv[:1, :1, :1] = 0  # a token of nothing
        self.feature_map = create_feature_map(
            case.feature_map, D, num_heads=N, num_features=case.num_features, scaling=case.scaling
        )
        self.weights = SpatialWeights(
            D, N, case.groups, case.kind, balanced=case.balanced, halt_threshold=case.threshold
        )
        torch.nn.init.normal_(self.weights.embedding, std=0.5)
        self.mask = torch.rand(B, *case.grid) < 0.3 if case.masked else None
        widths = (case.num_features, case.num_features, case.groups, D)
        self.upstream = [torch.randn(B, *case.grid, N, width) for width in widths]
        self._spare_the_kink()
        for i in (0, 1, 3):  # the weights and their gradient are float32
            self.upstream[i] = self.upstream[i].to(dtype)

    def _spare_the_kink(self):
        """No gradient where rounding decides on which side of its kink a ReLU is."""
        if self.case.feature_map in ("elu", "hedgehog"):  # these have none
            return
        double = deepcopy(self.feature_map).double()
        for i in (0, 1):
            x = self.qkv[:, :, :, i].double()
            x = x if self.mask is None or i == 0 else x.masked_fill(self._padded, 0)
            with patch("torch.nn.functional.relu", lambda z: z):
                z = double(x)
            self.upstream[i][z.abs() < 8 * torch.finfo(self.dtype).eps] = 0

    @property
    def _padded(self):
        return self.mask[..., None, None]

    @property
    def settings(self):
        """Parameters and options, as the modules say it themselves."""
        from ripple_attention.ops.kernels.qkv_features import FeatureOptions, FeatureParameters

        features, weights = self.feature_map.fused_spec(), self.weights.fused_spec()
        tensors = (*features.parameters, *weights[:3])
        parameters = FeatureParameters(*(x if x is None else x.detach() for x in tensors))
        return parameters, FeatureOptions(features.activation, features.scaling, *weights[3:])

    def by_modules(self, dtype):
        """Results and gradients of the modules, in float64, or as autocast would have them."""
        feature_map, weights = deepcopy(self.feature_map), deepcopy(self.weights)
        qkv = self.qkv.clone()
        if dtype == torch.float64:
            feature_map, weights, qkv = feature_map.double(), weights.double(), qkv.double()
        qkv.requires_grad_()
        q, k, v = qkv.unbind(3)
        with torch.autocast("cpu", dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
            if self.mask is not None:
                k, v = k.masked_fill(self._padded, 0), v.masked_fill(self._padded, 0)
            phi_q, phi_k = feature_map(q, k)
            if self.mask is not None:
                phi_k = phi_k.masked_fill(self._padded, 0)
            results = [phi_q, phi_k, weights(v), v]
        upstream = [g.to(x.dtype) for g, x in zip(self.upstream, results, strict=True)]
        leaves = _leaves(feature_map, weights)
        asked = [qkv, *(x for x in leaves if x is not None)]
        grads = iter(torch.autograd.grad(results, asked, upstream))
        found = [next(grads), *(x if x is None else next(grads) for x in leaves)]
        return [*results[:3], *found]

    def by_kernels(self, qkv=None, out=None):
        from ripple_attention.ops.kernels import qkv_features

        qkv = self.qkv if qkv is None else qkv
        q, k, v = qkv.unbind(3)
        parameters, options = self.settings
        phi_q, phi_k, alpha, _ = qkv_features.qkv_features_forward(
            q, k, v, parameters, options, self.case.groups, self.mask
        )
        out = qkv.new_empty(qkv.shape) if out is None else out
        of_q, of_k, of_alpha, of_v = self.upstream
        grads = qkv_features.map_backward(
            of_q, of_k, phi_q, phi_k, q, k, parameters, options, self.mask, *out.unbind(3)[:2]
        )
        grads += qkv_features.weights_backward(
            of_alpha, of_v, v, parameters, options, self.mask, out[:, :, :, 2], follows=True
        )
        if self.case.feature_map == "hedgehog":  # whose A is [W; −W]
            half = grads[1].shape[1] // 2
            grads[1] = grads[1][:, :half] - grads[1][:, half:]
        return [phi_q, phi_k, alpha, out, *grads]


def _leaves(feature_map, weights):
    of_weights = weights.proj.weight, weights.proj.bias, weights.embedding
    if hasattr(feature_map, "fc"):
        return feature_map.w1, feature_map.fc.weight, feature_map.fc.bias, *of_weights
    matrix, bias = (getattr(feature_map, name, None) for name in ("weight", "bias"))
    return None, matrix, bias, *of_weights


def assert_equal(got, expected):
    for name, ours, reference in zip(NAMES, got, expected, strict=True):
        assert torch.equal(ours, reference), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.grid}")
@interpreted
def test_errors_are_within_twice_pytorchs(case, dtype):
    inputs = Inputs(case, dtype)
    exact, theirs = inputs.by_modules(torch.float64), inputs.by_modules(dtype)
    ours = inputs.by_kernels()
    assert ours[0].dtype == ours[1].dtype == ours[3].dtype == dtype
    for name, x, y, reference in zip(NAMES, ours, theirs, exact, strict=True):
        if reference is None:
            assert x is None, name
            continue
        assert x.dtype == (torch.float32 if name not in NAMES[:2] + NAMES[3:4] else dtype), name
        assert x.shape == reference.shape, name
        allowed = 2 * relative_error(y, reference) + torch.finfo(torch.float32).eps
        assert relative_error(x, reference) <= allowed, name


def test_in_the_first_cases_some_ripples_halt_and_some_do_not():
    for case in CASES[:3]:
        alpha = Inputs(case, torch.float32).by_modules(torch.float64)[2]
        halted = (alpha[..., -2] == alpha[..., -1]).double().mean()
        assert 0.1 < halted < 0.95, case


@interpreted
def test_maps_and_weights_come_without_each_other():
    from ripple_attention.ops.kernels.qkv_features import FeatureParameters, qkv_features_forward

    inputs = Inputs(replace(CASES[1], grid=(5, 4)), torch.float32)
    q, k, v = inputs.qkv.unbind(3)
    (parameters, options), groups, mask = inputs.settings, inputs.case.groups, inputs.mask
    expected = inputs.by_kernels()
    maps, weights = (
        FeatureParameters(*parameters[:3]),
        FeatureParameters(*[None] * 3, *parameters[3:]),
    )
    phi_q, phi_k, nothing, _ = qkv_features_forward(q, k, v, maps, options, 0, mask)
    assert nothing is None
    assert torch.equal(phi_q, expected[0]) and torch.equal(phi_k, expected[1])
    no_map = options._replace(activation="")
    *nothing, alpha, _ = qkv_features_forward(None, None, v, weights, no_map, groups, mask)
    assert nothing == [None, None] and torch.equal(alpha, expected[2])


@pytest.mark.parametrize("blocks", [2, 9])  # of a chunk, at most
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: f"{case.grid}")
@interpreted
def test_sums_are_of_the_features_as_they_are_stored(case, dtype, blocks):
    from ripple_attention.ops.kernels import qkv_features

    before = qkv_features._fullest
    qkv_features._fullest = lambda count, *_: min(count, blocks)
    try:
        check_sums(case, dtype)
    finally:
        qkv_features._fullest = before


def check_sums(case, dtype):
    from ripple_attention.ops.kernels import qkv_features

    inputs = Inputs(case, dtype)
    q, k, v = inputs.qkv.unbind(3)
    if case.masked:
        v[inputs.mask] = torch.nan
    settings = (*inputs.settings, case.groups, inputs.mask)
    *expected, nothing = qkv_features.qkv_features_forward(q, k, v, *settings)
    *got, partial = qkv_features.qkv_features_forward(q, k, v, *settings, sums=True)
    assert nothing is None
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    values = torch.nn.functional.pad(v.double().nan_to_num(), (0, 1), value=1.0)
    exact = torch.einsum("bhwne,bhwnm->bnem", values, got[1].double())
    assert partial.dtype == torch.float32
    assert partial[:, :, 0].shape == exact.shape
    assert relative_error(partial.sum(2), exact) < 1e-6


@interpreted
def test_strides_do_not_matter():
    inputs = Inputs(Case(masked=True), torch.float16)
    expected = inputs.by_kernels()
    B, H, W, _, N, D = inputs.qkv.shape
    across = inputs.qkv.transpose(1, 2).contiguous().transpose(1, 2)  # columns before rows
    heads_first = inputs.qkv.transpose(1, 4).contiguous().transpose(1, 4)
    in_more = torch.full((B, H + 1, W + 2, 3, N, 2 * D), torch.nan, dtype=torch.float16)
    in_more[:, :H, 1:-1, ..., :D] = inputs.qkv
    sparse = torch.full((*inputs.qkv.shape, 2), torch.nan, dtype=torch.float16)
    sparse[..., 1] = inputs.qkv
    for qkv in (across, heads_first, in_more[:, :H, 1:-1, ..., :D], sparse[..., 1]):
        assert_equal(inputs.by_kernels(qkv), expected)
    mask, upstream = inputs.mask, inputs.upstream
    inputs.mask = mask.mT.contiguous().mT
    inputs.upstream = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in upstream]
    assert_equal(inputs.by_kernels(), expected)
    inputs.upstream = [x.mT.contiguous().mT for x in upstream]
    assert_equal(inputs.by_kernels(), expected)


@interpreted
def test_of_a_single_column_any_stride_will_do():
    inputs = Inputs(Case((7, 1), masked=True), torch.float32)
    expected = inputs.by_kernels()
    inputs.mask = inputs.mask.flatten(1)[:, None].clone().transpose(1, 2)
    assert inputs.mask.stride() == (7, 1, 7) and inputs.mask.is_contiguous()
    assert_equal(inputs.by_kernels(), expected)
    B, H, _, *rest = inputs.qkv.shape
    qkv = inputs.qkv.view(B, 1, H, *rest).clone().transpose(1, 2)
    assert qkv.stride(2) != qkv.stride(1)
    assert_equal(inputs.by_kernels(qkv), expected)


@interpreted
def test_every_result_is_written_and_nothing_else():
    inputs = Inputs(Case((3, 7), 24, 40, masked=True), torch.float32)
    expected = inputs.by_kernels()
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        assert_equal(inputs.by_kernels(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    room = torch.full((*inputs.qkv.shape[:3], 5, *inputs.qkv.shape[4:]), 7.0)
    out = room[:, :, :, 1:4]
    assert_equal(inputs.by_kernels(out=out), expected)
    assert torch.equal(out, expected[3])
    assert (room[:, :, :, [0, 4]] == 7).all()
    out[:, :, :, 2] = inputs.upstream[3]
    inputs.upstream[3] = out[:, :, :, 2]  # the gradient of v where its sum is to be
    assert_equal(inputs.by_kernels(out=out), expected)


@interpreted
def test_results_repeat_however_the_tokens_are_cut():
    from ripple_attention.ops.kernels import qkv_features

    inputs = Inputs(Case((9, 20), batch=1), torch.float16)
    expected = inputs.by_kernels()
    assert_equal(inputs.by_kernels(), expected)
    before = qkv_features._fullest
    qkv_features._fullest = lambda blocks, *_: blocks  # all in one program
    try:
        got = inputs.by_kernels()
    finally:
        qkv_features._fullest = before
    for i, (name, x, y) in enumerate(zip(NAMES, got, expected, strict=True)):
        if i < 4:  # of each token by itself
            assert torch.equal(x, y), name
        assert relative_error(x, y) < 1e-6, name


@pytest.mark.parametrize("masked", [False, True])
@interpreted
def test_images_below_each_other_are_as_images_apart(masked):
    inputs = Inputs(Case((5, 7), batch=3, masked=masked), torch.float32)
    expected = inputs.by_kernels()
    spread = torch.empty(3, 6, 7, *inputs.qkv.shape[3:])[:, 1:].copy_(inputs.qkv)  # a row between
    got = inputs.by_kernels(spread)
    for i, (name, x, y) in enumerate(zip(NAMES, got, expected, strict=True)):
        assert relative_error(x, y) < 1e-6 if i > 3 else torch.equal(x, y), name


@pytest.mark.parametrize(
    ("blocks", "heads", "at_once", "share"),
    [
        (1, 1, 528, 1),
        (1568, 6, 528, 18),  # 528 programs, all at once
        (1568, 6, 924, 11),
        (64, 6, 132, 3),
        (100_000, 6, 132, 16),  # 31 would be a thirtieth faster
        (0, 6, 132, 1),
    ],
)
@interpreted
def test_programs_fill_the_gpu_evenly(blocks, heads, at_once, share):
    from ripple_attention.ops.kernels.qkv_features import _fullest

    assert _fullest(blocks, heads, at_once) == share


@interpreted
def test_padding_stays_where_it_is():
    inputs = Inputs(Case(masked=True), torch.float32)
    expected = inputs.by_kernels()
    assert (expected[1][inputs.mask] == 0).all()
    assert (expected[3][inputs.mask][:, 1:] == 0).all()
    poisoned = inputs.qkv.clone()
    poisoned[:, :, :, 1:][inputs.mask] = torch.nan
    inputs.upstream[1][inputs.mask] = torch.nan
    inputs.upstream[3][inputs.mask] = torch.nan
    assert_equal(inputs.by_kernels(poisoned), expected)


@pytest.mark.parametrize(("batch", "grid"), [(0, (3, 4)), (2, (0, 4))])
@interpreted
def test_nothing_gives_nothing(batch, grid):
    inputs = Inputs(Case(grid), torch.float32)
    inputs.qkv = inputs.qkv[:batch]
    inputs.upstream = [x[:batch] for x in inputs.upstream]
    results = inputs.by_kernels()
    assert all((x == 0).all() for x in results[4:])
    assert results[3].shape == inputs.qkv.shape


@interpreted
def test_sines_are_right_at_any_angle():
    from ripple_attention.ops.kernels.qkv_features import (
        FeatureOptions,
        FeatureParameters,
        qkv_features_forward,
    )

    torch.manual_seed(0)
    angles = torch.cat([torch.randn(1000) * scale for scale in (1.0, 30.0, 1e4)])
    x = angles[: 3000 // 16 * 16].view(1, 1, -1, 1, 16)
    eye, zero = torch.eye(16), torch.zeros(16, 16)
    w2 = torch.cat([torch.cat([eye, zero], 1), torch.cat([zero, eye], 1)])  # sines, then cosines
    bias = torch.full((32,), 2.0)
    parameters = FeatureParameters(eye, w2, bias)
    phi, *_ = qkv_features_forward(x, x, x, parameters, FeatureOptions("relu", "none"))
    wide = x.double()
    expected = torch.cat([wide.sin(), wide.cos()], -1)
    assert (phi.double() - 2 - expected).abs().max() < 5e-7  # of which 2.4e-7 by adding 2


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature_map", ["learned", "hedgehog"])
def test_what_dispatch_lets_run_fits_the_smallest_shared_memory(monkeypatch, feature_map, dtype):
    from ripple_attention.ops.kernels import qkv_features

    form, smallest, ran = "sines" if feature_map == "learned" else "softmax", 99, []
    for width in (32, 64, 128):
        problem = Problem((9, 9), width, width, (0, 1), dtype, "cuda", None, form, "sticks", width)
        if features_fuse(problem._replace(shared=smallest)):
            continue
        with monkeypatch.context() as patches:
            compiled = compile_only(patches, 89, KERNELS, qkv_features)
            Inputs(Case((9, 9), width, width, feature_map=feature_map), dtype).by_kernels()
        assert max(binary.metadata.shared for _, binary in compiled) <= smallest * 1024
        ran.append(width)
    assert 32 in ran


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("capability", "dtype", "width", "hardware", "feature_map", "kind"),
    [
        *((c, d, 32, False, "learned", "stick-breaking") for c in (80, 90) for d in DTYPES),
        (80, torch.float16, 64, True, "learned", "softmax"),
        (90, torch.bfloat16, 64, True, "learned", "stick-breaking"),
        (80, torch.bfloat16, 128, True, "learned", "truncated"),
        (90, torch.bfloat16, 128, True, "learned", "stick-breaking"),
        (90, torch.bfloat16, 64, True, "elu", "softmax"),
        (90, torch.bfloat16, 64, True, "hedgehog", "stick-breaking"),
        (80, torch.float16, 128, True, "t2r", "stick-breaking"),
    ],
    ids=str,
)
def test_every_kernel_compiles(monkeypatch, capability, dtype, width, hardware, feature_map, kind):
    from ripple_attention.ops.kernels import qkv_features

    compiled = compile_only(monkeypatch, capability, KERNELS, qkv_features)
    monkeypatch.setattr(qkv_features, "BY_HARDWARE", hardware)
    monkeypatch.setattr(qkv_features, "_fullest", lambda *_: 12)  # blocks: as for a large batch
    case = Case((32, 32), width, width, masked=hardware, feature_map=feature_map, kind=kind)
    inputs = Inputs(case, dtype)
    inputs.by_kernels()
    assert [name for name, _ in compiled] == list(KERNELS)
    q, k, v = inputs.qkv.unbind(3)
    qkv_features.qkv_features_forward(q, k, v, *inputs.settings, case.groups, sums=True)
    for name, binary in compiled:
        wide = 163 if capability == 80 else 227  # kilobytes of an A100, of an H100
        assert binary.metadata.shared <= (99 if width <= 32 else wide) * 1024, name
        products = feature_map != "elu" or name != "map_gradient_kernel"  # which elu has none of
        assert ("mma" in binary.asm["ptx"]) == (products and dtype != torch.float32)
        if dtype == torch.bfloat16 and width <= 64:  # wider heads spill hundreds of bytes
            assert_hardly_spills(name, binary, 96)
