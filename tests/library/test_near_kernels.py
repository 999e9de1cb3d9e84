"""Kernels of near softmax: run by Triton's interpreter on a CPU, and compiled for absent GPUs."""

import pytest
import torch
from near_inputs import CASES, compare, definition, make_near, masks, run

from inputs import relative_error
from kernels import HERE, compile_only, interpreted, needs_triton, stack_bytes, use_tiles
from ripple_attention import RippleAttention, RippleHeads, chebyshev, dispatch

pytestmark = needs_triton

SHAPES = [  # case, grid, width, prefix tokens, mask, images
    ("rings", (1, 1), 16, 0, "none", 2),
    ("rings", (1, 7), 5, 2, "random", 2),
    ("wide", (7, 5), 16, 1, "image", 2),
    ("one ring far", (5, 12), 20, 0, "none", 1),
    ("doubling rings", (10, 9), 8, 1, "random", 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@interpreted
def test_as_precise_as_tiled(shape, dtype):
    case, grid, width, prefix, mask_kind, images = SHAPES[shape]
    use_tiles(384 if images == 2 else 0)
    partition, distance = CASES[case]
    mask, of_prefix = (x if x is None else x[:images] for x in masks(mask_kind, grid, prefix))
    inputs = make_near(grid, partition, prefix, heads=1, width=width, dtype=dtype)
    inputs = tuple(x[:images] for x in inputs)
    exact = tuple(x.double() for x in inputs)
    expected = definition(partition, distance, mask, of_prefix)
    plain = compare(run("tiled", partition, distance, mask, of_prefix), expected, inputs, exact)
    kernels = run("tiled_triton", partition, distance, mask, of_prefix)
    for name, (ours, reference) in compare(kernels, expected, inputs, exact).items():
        allowed = 2 * relative_error(plain[name][0], reference) + torch.finfo(dtype).eps
        assert ours.dtype == plain[name][0].dtype
        assert relative_error(ours, reference) <= allowed, name


@pytest.mark.parametrize("name", ["naive_triton", "table_triton"])
@interpreted
def test_every_algorithm_by_kernels_takes_the_window(name):
    partition, distance = CASES["doubling rings"]
    inputs = make_near((6, 5), partition, dtype=torch.float32, heads=1)
    exact = tuple(x.double() for x in inputs)
    found = compare(run(name, partition, distance), definition(partition, distance), inputs, exact)
    for key, (ours, reference) in found.items():
        assert relative_error(ours, reference) < 3e-6, key


@pytest.mark.parametrize("near", ["features", "softmax"])
@interpreted
def test_layers_with_prefix_tokens_compile_as_one_graph(near):
    torch.manual_seed(0)
    layer = RippleAttention(
        16, 2, max_distance=2, near=near, num_prefix_tokens=2, implementation="tiled_triton"
    )
    x = torch.randn(1, 2 + 20, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, got = layer(x, grid_size=(4, 5)), compiled(x, grid_size=(4, 5))
    assert relative_error(got, expected) < 1e-6
    parameters = tuple(layer.parameters())
    ours, reference = (
        torch.autograd.grad(out.square().sum(), parameters) for out in (got, expected)
    )
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("mode", ["whole", "tiles"])
@interpreted
def test_strides_do_not_matter_and_nothing_is_left_unwritten(mode):
    use_tiles(384 if mode == "whole" else 0)
    partition, grid = chebyshev(2), (5, 11) if mode == "tiles" else (5, 9)
    inputs = make_near(grid, partition, dtype=torch.float32, heads=1, width=16)
    inputs = tuple(x[:1] for x in inputs)
    strided = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in inputs[:6]]
    got = run("tiled_triton", partition)
    first = compare(got, got, inputs)
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        leaves = tuple(x.detach().requires_grad_() for x in (*strided, inputs[6]))
        out = got(*leaves)
        generator = torch.Generator().manual_seed(2)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        grads = torch.autograd.grad(out, leaves, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    for (ours, again), strided_result in zip(first.values(), (out, *grads), strict=True):
        assert torch.equal(ours, again) and torch.equal(ours, strided_result)


@interpreted
def test_offsets_pass_two_to_the_31():
    use_tiles()
    partition, row = chebyshev(2), 2**30
    storage = torch.empty(2 * row + 2**16, dtype=torch.float16)  # pages not touched cost nothing
    inputs = list(make_near((3, 20), partition, dtype=torch.float16, width=16, heads=1))
    expected = run("tiled_triton", partition)(*(x[:1] for x in inputs))
    for i in (0, 1, 4):
        x = inputs[i][:1]
        strides = (0, row, x.shape[-1], x.shape[-1], 1)
        inputs[i] = storage[i * 2**12 :].as_strided(x.shape, strides).copy_(x)
    assert torch.equal(run("tiled_triton", partition)(*(x[:1] for x in inputs)), expected)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
@interpreted
def test_large_scores_overflow_nowhere(shift):
    partition = chebyshev(3)
    q, k, *others = make_near((7, 5), partition, dtype=torch.float32, heads=1)
    q[..., -1], k[..., -1] = shift / 100, 100 * 6**0.5
    inputs = (q, k, *others)
    exact = tuple(x.double() for x in inputs)
    found = compare(run("tiled_triton", partition), definition(partition), inputs, exact)
    assert all(ours.isfinite().all() for ours, _ in found.values())
    assert relative_error(*found["out"]) < 3e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@interpreted
def test_what_is_not_finite_does_not_become_finite(value):
    partition = chebyshev(2)
    for place in range(5):
        inputs = make_near((5, 6), partition, dtype=torch.float32, heads=1)
        inputs[place][0, 3, 2, 0, 0] = value
        assert not run("tiled_triton", partition)(*inputs)[0, 3, 2, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_opcheck(dtype):
    partition = chebyshev(2)
    q, k, phi_q, phi_k, v, weights, scale = (
        x[:1].clone().requires_grad_() for x in make_near((3, 4), partition, dtype=dtype, heads=1)
    )
    ops, radii = torch.ops.ripple_attention, list(partition.radii)
    mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    for given in (None, mask):
        window = (q, k, v, weights[..., :2], given, radii, 0.5)
        torch.library.opcheck(ops.near_window_triton, window)
    share = torch.rand_like(v, dtype=scale.dtype), torch.rand_like(scale)
    share = tuple(x.detach().requires_grad_() for x in share)
    for name in ("tiled_triton", "naive_triton"):
        arguments = (phi_q, phi_k, v, weights, *share, radii, 0.5)
        torch.library.opcheck(getattr(ops, f"{name}_shared"), arguments)


@interpreted
def test_layers_run_and_compile_with_kernels():
    torch.manual_seed(0)
    options = {"near": "softmax", "num_prefix_tokens": 1}
    layer = RippleAttention(32, 2, implementation="tiled_triton", **options)
    x, sizes = torch.randn(1, 36, 32), {"grid_size": (7, 5)}
    out = layer(x, **sizes)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x, **sizes), out) < 1e-6
    layer.implementation = "tiled"
    assert relative_error(layer(x, **sizes), out) < 1e-5


def test_kernels_run_by_name_alone(monkeypatch, capsys):
    heads = RippleHeads(16, 1, near="softmax")
    problem = heads._problem(torch.randn(1, 8, 8, 1, 16), None, None)
    on_gpu = problem._replace(device="cuda", machine=None)
    assert dispatch.choose_window(on_gpu, "tiled_triton", "auto") == "tiles"
    assert dispatch.choose_window(on_gpu, "tiled_triton", "tiled_triton") == "kernels"
    assert dispatch.choose_window(on_gpu, "naive", "auto") == "pairs"
    monkeypatch.setattr(dispatch, "NEAR_KERNELS", True)
    assert dispatch.choose_window(on_gpu, "tiled_triton", "auto") == "kernels"
    too_wide = on_gpu._replace(head_dim=200)
    with pytest.raises(ValueError, match="queries of at most 128 channels; got 200"):
        dispatch.choose(too_wide, "tiled_triton")
    assert dispatch.explain(on_gpu, "tiled_triton") == "tiled_triton"
    assert "within 3 of a query: softmax by kernels" in capsys.readouterr().out


COMPILED = [  # width, type, capability
    (32, torch.float32, 80),
    (64, torch.bfloat16, 80),
    (96, torch.bfloat16, 90),
    (128, torch.float16, 90),
]


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(("width", "dtype", "capability"), COMPILED)
def test_every_kernel_compiles_and_fits_the_smallest_shared_memory(
    width, dtype, capability, monkeypatch
):
    from ripple_attention.ops.kernels import near

    names = "forward_kernel", "query_gradient_kernel", "key_gradient_kernel"
    compiled = compile_only(monkeypatch, capability, names, near)
    q, k, v = torch.zeros(1, 64, 64, 3, 2, width, dtype=dtype).unbind(3)
    weights, mask = torch.zeros(1, 64, 64, 2, 4), torch.zeros(1, 64, 64, dtype=torch.bool)
    given = (q, k, v, weights, mask)
    out, log_sum = near.near_triton_forward(*given, [0, 1, 2, 3], 0.1)
    near.near_triton_backward(out, log_sum, *given, out, log_sum, [0, 1, 2, 3], 0.1)
    assert [name for name, _ in compiled] == list(names)
    for name, binary in compiled:
        assert binary.metadata.shared <= 99 * 1024, name  # of compute capability 8.6 and 8.9
        assert ("mma" in binary.asm["ptx"]) == (dtype != torch.float32), name
        assert stack_bytes(binary) == 0, name  # all stays in registers
