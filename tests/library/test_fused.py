"""The fused operators: all of a layer between its projections, against the layer in PyTorch."""

from functools import partial

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from inputs import relative_error
from kernels import HERE, compile_only, interpreted, needs_triton, use_tiles
from ripple_attention import LinearAttention, RippleAttention
from ripple_attention.ops.fused import fused_linear_attention, fused_ripple_attention
from ripple_attention.ops.tiling import is_single_window

pytestmark = needs_triton


def make_layer(kind, **options):
    torch.manual_seed(0)
    layer = kind(32, num_heads=2, **options)
    if kind is RippleAttention:  # far from uniform, some halted
        torch.nn.init.normal_(layer.spatial_weights.embedding, std=0.7)
    return layer


def make_mask(grid):
    mask = torch.zeros(2, *grid, dtype=torch.bool)
    mask[1, :, grid[1] // 2 :] = True
    return mask


def fused(layer, x, mask):
    """What the layer computes where fused kernels can run."""
    qkv = layer.qkv(x).unflatten(-1, (3, layer.num_heads, layer.head_dim))
    if mask is not None:
        padded = mask[..., None, None, None] & torch.tensor([False, True, True])[:, None, None]
        qkv = qkv.masked_fill(padded, 0)
    features = layer.feature_map.fused_spec()
    if isinstance(layer, RippleAttention):
        weights = layer.spatial_weights.fused_spec()
        out = fused_ripple_attention(qkv, mask, features, weights, layer.partition.radii, layer.eps)
    else:
        out = fused_linear_attention(qkv, mask, features, layer.eps)
    return layer.proj(out.flatten(3))


def results(run, layer, x):
    """The output, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    out = run(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), upstream)


CASES = [
    (RippleAttention, (5, 6), False, {"max_distance": 2}),
    (RippleAttention, (5, 6), True, {"max_distance": 3, "halt_threshold": 0.2}),
    (RippleAttention, (11, 10), False, {"max_distance": 2, "eps": 0.0}),  # more than a window
    (RippleAttention, (4, 9), False, {"partition": "logarithmic", "max_distance": 3}),
    (LinearAttention, (5, 7), False, {}),
    (LinearAttention, (9, 8), True, {"eps": 0.0, "feature_map_options": {"scaling": "scaled"}}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", range(len(CASES)))
@interpreted
def test_fused_kernels_are_as_precise_as_the_layer(case, dtype):
    kind, grid, masked, options = CASES[case]
    layer, mask = make_layer(kind, **options), make_mask(grid) if masked else None
    attend, attend_fused = partial(layer, key_padding_mask=mask), partial(fused, layer, mask=mask)
    use_tiles()
    if kind is RippleAttention:
        assert is_single_window(*grid, layer.partition.radii) == (grid != (11, 10))
    half = dtype == torch.float16  # parameters stay float32, as under autocast
    if half:  # no feature so near to zero that rounding decides whether it has a gradient
        features = torch.arange(layer.feature_map.num_features)
        torch.nn.init.zeros_(layer.feature_map.fc.bias).data += 2.0 - 4.0 * (features % 2)

    def cast(run):
        def inside(x):
            with torch.autocast("cpu", dtype, enabled=half):
                return run(x)

        return inside

    errors = []
    for _ in range(1 if half else 4):  # few numbers, as a bias's gradient, are rounded by luck
        x = torch.randn(2 if masked else 1, *grid, 32)
        x = x.half().float() if half else x
        layer.double().implementation = "naive"
        reference = results(attend, layer, x.double())
        layer.float().implementation = "tiled"
        found = [results(cast(run), layer, x) for run in (attend_fused, attend)]
        assert [a.dtype for a in found[0]] == [b.dtype for b in found[1]]
        for given in found:
            errors.append([relative_error(a, b) for a, b in zip(given, reference, strict=True)])
    ours, plain = (torch.tensor(errors[i::2]).square().mean(0).sqrt() for i in (0, 1))
    assert (ours <= 2 * plain + torch.finfo(dtype).eps).all()


@interpreted
def test_a_layer_uses_them_where_they_run_and_compiles():
    layer, x = make_layer(RippleAttention, implementation="tiled_triton"), torch.randn(1, 4, 5, 32)
    assert layer.explain(x) == "fused"
    out = results(layer, layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(results(compiled, layer, x), out, strict=True):
        assert relative_error(a, b) < 1e-5
    layer.fuse = False
    assert layer.explain(x) == "tiled_triton"
    for a, b in zip(results(layer, layer, x), out, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("fuse", [True, False])
@interpreted
def test_gradients_of_kernels_pass_through_ddp(fuse):
    layer = make_layer(RippleAttention, implementation="tiled_triton")
    layer.fuse = fuse
    x = torch.randn(2, 5, 6, 32)
    assert layer.explain(x) == ("fused" if fuse else "tiled_triton")
    layer(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        layer.zero_grad()
        DistributedDataParallel(layer)(x).square().sum().backward()
    finally:
        distributed.destroy_process_group()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


@interpreted
def test_second_derivatives_are_refused_with_a_remedy():
    layer, x = make_layer(LinearAttention), torch.randn(1, 2, 3, 32).requires_grad_()
    (grad,) = torch.autograd.grad(fused(layer, x, None).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="fused kernels has first derivatives only.*fuse"):
        grad.sum().backward()
    layer.fuse = False
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad.norm() > 0


@interpreted
def test_a_layer_does_without_them_where_they_do_not_fit():
    x = torch.randn(1, 4, 5, 32)

    def runs(**options):
        options = {"implementation": "tiled_triton"} | options
        return make_layer(RippleAttention, **options).explain(x)

    for fits in ({}, {"weights": "truncated"}, {"feature_map": "t2r"}, {"tail": "printed"}):
        assert runs(**fits) == "fused"
    assert runs(implementation="tiled") == "tiled"
    assert runs(implementation="auto") == "tiled"  # on a CPU
    assert runs(feature_map="learned-random-w1") == "tiled_triton"


@pytest.mark.parametrize("masked", [False, True])
@interpreted
def test_opcheck(masked):
    grid = (3, 4)
    mask = make_mask(grid) if masked else None
    for kind in (RippleAttention, LinearAttention):
        layer = make_layer(kind)
        qkv = torch.randn(2, *grid, 3, 2, 16, requires_grad=True)
        of_map, tensors = layer.feature_map.fused_spec(), ()
        options = (of_map.activation, of_map.scaling, 0.5)
        if kind is RippleAttention:
            of_weights = layer.spatial_weights.fused_spec()
            tensors = (*of_weights[:3], None)
            radii = list(layer.partition.radii)
            options = (radii, *options[:2], *of_weights[3:], 0.5)
        name = "fused_ripple" if kind is RippleAttention else "fused_linear"
        operator = getattr(torch.ops.ripple_attention, name)
        torch.library.opcheck(operator, (qkv, mask, *of_map.parameters, *tensors, *options))


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_of_linear_attention_compiles(dtype, capability, monkeypatch):
    from ripple_attention.ops.kernels import far, linear

    names = {"state_kernel", "linear_kernel"}
    names |= {"linear_query_gradient_kernel", "linear_key_gradient_kernel"}
    compiled = compile_only(monkeypatch, capability, names, far, linear)
    q, k, v = torch.zeros(1, 20, 20, 3, 2, 32, dtype=dtype).unbind(3)
    results = linear.linear_triton_forward(q, torch.zeros(1, 2, 3, 33, 32), 0.0)
    linear.linear_triton_backward(results[0], q, k, v, *results)
    assert {name for name, _ in compiled} == names
    assert all(len(binary.asm["cubin"]) > 0 for _, binary in compiled)


@pytest.mark.skipif(HERE, reason="the interpreter takes CPU tensors")
def test_on_a_cpu_layers_are_as_they_were():
    x = torch.randn(1, 4, 5, 32)
    for kind in (RippleAttention, LinearAttention):
        assert make_layer(kind).explain(x) != "fused"
