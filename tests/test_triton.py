"""The Triton kernels: run by Triton's interpreter on a CPU, and compiled for GPUs not present."""

import importlib
import importlib.util
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from inputs import gradients, make_inputs, make_mask, relative_error
from kernels import HERE, AbsentGPU, CompileOnly, interpreted
from ripple_attention import (
    Partition,
    RippleAttention,
    chebyshev,
    choose_implementation,
    logarithmic,
    ripple_attention,
)
from ripple_attention.ops import triton_support
from ripple_attention.ops.triton_support import triton_refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton installed"
)

NEAR = chebyshev(4)
KERNELS = {
    "tiled_triton": (
        "state_kernel",
        "cut_kernel",
        "forward_kernel",
        "query_gradient_kernel",
        "key_gradient_kernel",
    ),
    "table_triton": (
        "_scan_rows",
        "_scan_columns",
        "_forward",
        "_query_gradients",
        "_add_key_gradients",
    ),
    "naive_triton": ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel"),
}
SLAB_KERNELS = ["strip_kernel", "slab_gradient_kernel", "image_kernel", "image_gradient_kernel"]


def run(implementation, partition, mask=None, eps=0.0):
    return lambda *tensors: ripple_attention(
        *tensors,
        partition=partition,
        key_padding_mask=mask,
        implementation=implementation,
        eps=eps,
    )


def assert_within_twice(name, partition, inputs, mask=None, eps=0.0):
    """The error of a kernel is at most twice that of the same algorithm in PyTorch."""
    exact = gradients(run("naive", partition, mask, eps), tuple(x.double() for x in inputs))
    plain = gradients(run(name, partition, mask, eps), inputs)
    got = gradients(run(f"{name}_triton", partition, mask, eps), inputs)
    rounding = torch.finfo(inputs[0].dtype).eps
    for ours, theirs, reference in zip(
        (got[0], *got[1]), (plain[0], *plain[1]), (exact[0], *exact[1]), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, reference) <= 2 * relative_error(theirs, reference) + rounding


def use_tiles(largest_whole=0):
    """Small grids are one window otherwise."""
    from ripple_attention.ops import triton_support

    triton_support.WHOLE_TOKENS = largest_whole


WHOLE = [  # grid, partition, M, E, mask, eps
    ((1, 1), chebyshev(1), 16, 16, "none", 0.0),
    ((1, 7), chebyshev(2), 8, 32, "random", 0.5),
    ((7, 5), chebyshev(4), 16, 16, "none", 0.0),
    ((7, 5), chebyshev(5), 32, 48, "rows", 0.0),
    ((7, 5), logarithmic(3), 48, 8, "image", 0.5),
    ((1, 40), logarithmic(3), 5, 3, "none", 0.0),
    ((9, 3), chebyshev(16), 16, 1, "none", 0.0),
]
TILES = [  # and heads
    ((1, 70), chebyshev(1), 8, 16, "none", 0.0, 3),
    ((9, 20), chebyshev(2), 16, 16, "random", 0.5, 2),
    ((9, 20), chebyshev(4), 32, 32, "none", 0.0, 1),
    ((17, 16), logarithmic(3), 16, 48, "rows", 0.0, 1),
    ((17, 16), Partition((1,)), 48, 8, "none", 0.5, 1),
    ((13, 20), chebyshev(5), 5, 3, "none", 0.0, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", range(len(WHOLE)))
@interpreted
def test_small_grids_are_as_precise_as_tiled(case, dtype):
    grid, partition, M, E, mask_kind, eps = WHOLE[case]
    heads = 1 if mask_kind == "none" else 2
    inputs = make_inputs(grid, partition, features=M, value_dim=E, dtype=dtype, heads=heads)
    assert_within_twice("tiled", partition, inputs, make_mask(mask_kind, grid), eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", range(len(TILES)))
@interpreted
def test_tiles_are_as_precise_as_tiled(case, dtype):
    grid, partition, M, E, mask_kind, eps, heads = TILES[case]
    use_tiles()
    inputs = make_inputs(
        grid, partition, features=M, value_dim=E, dtype=dtype, batch=1, heads=heads
    )
    assert_within_twice("tiled", partition, inputs, make_mask(mask_kind, grid, 1), eps)


TABLES = [  # grid, partition, M, E, mask, eps
    ((1, 1), chebyshev(1), 4, 4, "none", 0.5),
    ((1, 7), chebyshev(2), 8, 5, "random", 0.0),
    ((5, 4), chebyshev(9), 4, 8, "none", 0.0),
    ((6, 5), logarithmic(3), 5, 3, "image", 0.5),
    ((7, 5), Partition((1, 4)), 16, 16, "rows", 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", range(len(TABLES)))
@interpreted
def test_tables_are_as_precise_as_table(case, dtype):
    grid, partition, M, E, mask_kind, eps = TABLES[case]
    inputs = make_inputs(grid, partition, features=M, value_dim=E, dtype=dtype)
    assert_within_twice("table", partition, inputs, make_mask(mask_kind, grid), eps)


PAIRS = [  # grid, partition, M, E, mask, eps
    ((1, 1), chebyshev(1), 8, 8, "none", 0.5),
    ((1, 20), chebyshev(19), 16, 5, "random", 0.0),
    ((7, 5), chebyshev(9), 5, 16, "none", 0.0),
    ((6, 18), logarithmic(17), 16, 16, "image", 0.5),
    ((9, 7), Partition((1, 4)), 48, 32, "rows", 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", range(len(PAIRS)))
@interpreted
def test_pairs_are_as_precise_as_naive(case, dtype):
    grid, partition, M, E, mask_kind, eps = PAIRS[case]
    inputs = make_inputs(grid, partition, features=M, value_dim=E, dtype=dtype)
    assert_within_twice("naive", partition, inputs, make_mask(mask_kind, grid), eps)


@interpreted
def test_a_table_leaves_nothing_unwritten_and_repeats():
    partition, grid = chebyshev(2), (3, 5)
    q, k, v = torch.rand(1, *grid, 3, 2, 4).unbind(3)
    weights = torch.rand(1, 2, *grid, 3).permute(0, 2, 3, 1, 4)
    q[:, 1] = 0
    expected = gradients(run("table_triton", partition), (q, k, v, weights))
    assert (expected[0][:, 1] == 0).all()
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        got = gradients(run("table_triton", partition), (q, k, v, weights))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@interpreted
def test_a_rest_that_outweighs_the_near_keeps_its_digits(dtype):
    # The near part is then negative, and takes back most of what the far part added.
    use_tiles()
    partition = chebyshev(4)
    inputs = make_inputs((9, 20), partition, features=16, dtype=dtype, batch=1, heads=1)
    inputs[3][:] = 0.01 * inputs[3]
    inputs[3][..., -1] = 1
    assert_within_twice("tiled", partition, inputs)


@interpreted
def test_half_precision_may_exceed_its_own_range_inside():
    # Products of 300 · 300 are too large for float16, and the sums of small ones too small.
    for scale in (300.0, 1e-3):
        inputs = make_inputs((7, 5), chebyshev(3), dtype=torch.float16, features=16)
        inputs = (scale * inputs[0], scale * inputs[1], *inputs[2:])
        out = run("tiled_triton", chebyshev(3))(*inputs)
        exact = run("naive", chebyshev(3))(*(x.double() for x in inputs))
        assert relative_error(out, exact) < 1e-3


@pytest.mark.parametrize("mode", ["whole", "tiles"])
@interpreted
def test_strides_do_not_matter_and_nothing_is_left_unwritten(mode):
    use_tiles(384 if mode == "whole" else 0)
    partition, grid = chebyshev(2), (5, 20) if mode == "tiles" else (5, 9)
    q, k, v = torch.rand(1, *grid, 3, 2, 16).unbind(3)
    weights = torch.rand(1, 2, *grid, 3).permute(0, 2, 3, 1, 4)
    upstream = torch.rand(1, 2, 16, *grid).permute(0, 3, 4, 1, 2)  # not even channels are dense
    inputs = (q, k, v, weights)
    assert not any(x.is_contiguous() for x in (*inputs, upstream))

    def results(*tensors):
        leaves = tuple(x.detach().requires_grad_() for x in tensors[:4])
        out = run("tiled_triton", partition)(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[4])

    expected = results(*(x.contiguous() for x in (*inputs, upstream)))
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        got = results(*inputs, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@interpreted
def test_offsets_pass_two_to_the_31():
    use_tiles()
    partition, row = chebyshev(1), 2**30
    storage = torch.empty(2 * row + 2**16, dtype=torch.float16)  # pages not touched cost nothing
    tensors = []
    for start in range(4):
        x = storage[start * 2**12 :].as_strided((1, 3, 20, 2, 16), (0, row, 32, 16, 1))
        tensors.append(x.copy_(torch.rand(x.shape)))
    q, k, v, upstream = tensors
    weights = torch.rand(1, 3, 20, 2, 2)

    def results(q, k, v, upstream):
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v, weights))
        out = run("tiled_triton", partition)(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    expected = results(*(x.contiguous() for x in tensors))
    got = results(q, k, v, upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("mode", ["whole", "tiles"])
@interpreted
def test_zero_denominators_give_zeros_and_results_repeat(mode):
    use_tiles(384 if mode == "whole" else 0)
    partition, grid = chebyshev(2), (5, 20) if mode == "tiles" else (4, 5)
    q, k, v, weights = make_inputs(grid, partition, dtype=torch.float32, batch=1, heads=1)
    q[:, 1] = 0
    out, grads = gradients(run("tiled_triton", partition), (q, k, v, weights))
    assert (out[:, 1] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, 1] == 0).all() and (grads[3][:, 1] == 0).all()
    again = gradients(run("tiled_triton", partition), (q, k, v, weights))
    assert torch.equal(out, again[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, again[1], strict=True))


@pytest.mark.parametrize("eps", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_queries_that_see_dead_keys_alone_give_zeros(dtype, eps):
    use_tiles()
    partition = chebyshev(4)
    q, k, v, weights = make_inputs((11, 20), partition, batch=1, heads=1, dtype=dtype)
    dead = torch.ones(11, 20, dtype=torch.bool)
    dead[4:7, 9:12] = False
    k[:, dead] = 0
    weights = torch.zeros_like(weights)
    weights[..., -1] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    blind = run("tiled_triton", partition, eps=eps)(*leaves)[:, 3:8, 8:13]
    grads = torch.autograd.grad(blind.sum(), leaves)
    bound = 1e-5 if dtype == torch.float32 else 1e-3  # parts of bfloat16 hold 16 bits of a sum
    assert blind.abs().max() <= (bound if eps == 0.5 else 0)
    assert all(grad.isfinite().all() for grad in grads)
    if eps == 0:
        assert all((grad == 0).all() for grad in grads)


@interpreted
def test_nan_stays_where_it_belongs():
    use_tiles()
    partition = chebyshev(2)
    q, k, v, weights = make_inputs((5, 20), partition, dtype=torch.float32)
    q[0, 2, 3, 1] = torch.nan
    weights[0, 4, 4, 0] = torch.nan
    v[1, 0, 0, 0] = torch.nan
    broken = run("tiled_triton", partition)(q, k, v, weights).isnan().any(-1)
    expected = torch.zeros_like(broken)
    expected[0, 2, 3, 1] = expected[0, 4, 4, 0] = True
    expected[1, :, :, 0] = torch.einsum("hwm,xym->hw", q[1, :, :, 0], k[1, :, :, 0]) != 0
    assert torch.equal(broken, expected)


@pytest.mark.parametrize("name", ["tiled_triton", "table_triton", "naive_triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_opcheck(dtype, name):
    partition = chebyshev(2)
    inputs = make_inputs((3, 4), partition, dtype=dtype, batch=1)
    strided = torch.rand(1, 3, 4, 2, 2, 5).to(dtype).unbind(3)
    for q, k in (inputs[:2], strided):
        tensors = tuple(x.detach().requires_grad_() for x in (q, k, *inputs[2:]))
        operator = getattr(torch.ops.ripple_attention, name)
        torch.library.opcheck(operator, (*tensors, list(partition.radii), 0.5))


@interpreted
def test_a_layer_compiles_without_a_graph_break():
    torch.manual_seed(0)
    layer = RippleAttention(16, num_heads=2, max_distance=2, implementation="tiled_triton")
    x, parameters = torch.randn(1, 4, 5, 16), tuple(layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, got = layer(x), compiled(x)
    assert relative_error(got, expected) < 1e-6
    ours = torch.autograd.grad(got.square().sum(), parameters)
    reference = torch.autograd.grad(expected.square().sum(), parameters)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(ours, reference, strict=True))


@interpreted
def test_what_the_kernels_do_not_take_is_refused_in_words():
    def attempt(features=5, max_distance=3, dtype=torch.float32):
        partition = chebyshev(max_distance)
        inputs = make_inputs((3, 4), partition, features=features, dtype=dtype)
        run("tiled_triton", partition)(*inputs)

    with pytest.raises(ValueError, match="needs float32, .*got torch.float64.* can run"):
        attempt(dtype=torch.float64)
    with pytest.raises(ValueError, match="last box of radius ≤ 16; got 17"):
        attempt(max_distance=18)
    with pytest.raises(ValueError, match="at most 128 features .*got 129"):
        attempt(features=129)


@pytest.mark.skipif(HERE, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_refused_in_words():
    inputs = make_inputs((3, 4), chebyshev(3), dtype=torch.float32)
    with pytest.raises(ValueError, match="needs tensors on an NVIDIA GPU .*got 'cpu'.*'tiled'"):
        run("tiled_triton", chebyshev(3))(*inputs)


def test_auto_takes_the_kernels_where_they_run(monkeypatch):
    def choice(capability, partition=NEAR, dtype=torch.bfloat16, side=64):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return choose_implementation((side, side), 32, 32, partition, device="cuda", dtype=dtype)

    assert choice((9, 0)) == choice((8, 0)) == "tiled_triton"
    assert choice((7, 5)) == "tiled"
    assert choice((7, 5), Partition((0, 40))) == "table"
    assert choice((9, 0), dtype=torch.float64) == "tiled"
    assert choice((9, 0), chebyshev(40)) == "naive_triton"
    assert choice((9, 0), chebyshev(40), side=129) == "tiled"
    assert choice((9, 0), chebyshev(40), dtype=torch.float32) == "tiled"
    assert choice((9, 0), Partition((0, 40)), side=129) == "table_triton"
    arguments = "table_triton", torch.device("cuda"), torch.float32, 32, (0, 1)
    assert triton_refusal(*arguments) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "capability 8.0 or newer; got (7, 5)" in triton_refusal(*arguments)
    monkeypatch.setattr(triton_support, "find_spec", lambda _: None)
    assert "needs triton, which is not installed" in triton_refusal(*arguments)


def test_only_a_launch_like_an_earlier_one_skips_the_search(monkeypatch):
    from triton.compiler import CompiledKernel

    from ripple_attention.ops import launch

    class Compiled(CompiledKernel):
        def __init__(self):
            pass

        def __getitem__(self, grid):
            return lambda *arguments: runs.append(("found", grid, arguments[0]))

    class Kernel:
        def __getitem__(self, grid):
            def search(*arguments, **options):
                runs.append(("searched", grid, arguments[0]))
                return Compiled()

            return search

    monkeypatch.setattr(launch, "READY", {})
    runs, kernel, x = [], Kernel(), torch.zeros(32)

    def ways(tensor, *numbers, grid=(1, 1, 1), of=kernel, **options):
        runs.clear()
        launch.launch(of, grid, tensor, *numbers, **options)
        return [way for way, *_ in runs]

    like = [((x, 3), {"num_warps": 4}), ((x + 1, 3), {"num_warps": 4})]
    unlike = [
        ((x, 4), {"num_warps": 4}),
        ((x, 3), {"num_warps": 8}),
        ((x[1:], 3), {"num_warps": 4}),
    ]
    unlike += [((x.double(), 3), {"num_warps": 4}), ((x, (3, 1)), {"num_warps": 4})]
    assert ways(*like[0][0], **like[0][1]) == ["searched"]
    for arguments, options in like:
        assert ways(*arguments, **options) == ["found"]
    for arguments, options in unlike:
        assert ways(*arguments, **options) == ["searched"]
    assert ways(x, 3, num_warps=4, of=Kernel()) == ["searched"]
    assert ways(x, 3, num_warps=4, grid=(1, 2, 70000)) == ["found", "searched"]
    assert runs == [("found", (1, 2, 65535), 0), ("searched", (1, 2, 4465), 65535)]
    monkeypatch.setattr(launch, "MOST", len(launch.READY))
    assert ways(x, 5, num_warps=4) == ["searched"] and len(launch.READY) == 1


def test_an_exported_layer_holds_plain_operations():
    layer = RippleAttention(16, num_heads=2, implementation="tiled_triton").eval()
    x = torch.randn(1, 6, 7, 16)
    program = torch.export.export(layer, (x,))
    assert "triton" not in str(program.graph)
    layer.implementation = "tiled"
    assert relative_error(program.module()(x), layer(x)) < 1e-6


@pytest.fixture
def compile_for(monkeypatch):
    """A function that compiles all that both passes launch, for a GPU of some capability."""
    from triton.runtime.driver import driver

    from ripple_attention.ops import tiled_triton

    def compile_all(capability, dtype, width, grid, partition=NEAR, name="tiled_triton"):
        module = importlib.import_module(f"ripple_attention.ops.{name}")
        far = importlib.import_module("ripple_attention.ops.far_triton")
        compiled = []
        monkeypatch.setattr(driver, "_active", AbsentGPU(capability))
        monkeypatch.setattr(tiled_triton, "SLABS", False)
        for kernel_name in KERNELS[name]:
            home = module if hasattr(module, kernel_name) else far
            kernel = getattr(home, kernel_name)
            kernel = kernel.kernel if isinstance(kernel, CompileOnly) else kernel
            monkeypatch.setattr(home, kernel_name, CompileOnly(kernel, compiled))
        q, k, v = torch.zeros(1, *grid, 3, 2, width, dtype=dtype).unbind(3)
        weights = torch.zeros(1, *grid, 2, partition.num_groups)
        radii = list(partition.radii)
        forward, backward = (getattr(module, f"{name}_{way}") for way in ("forward", "backward"))
        results = forward(q, k, v, weights, radii, 0.0)
        backward(results[0], q, k, v, weights, *results, radii)
        return compiled

    return compile_all


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_compiles(compile_for, dtype, capability):
    compiled = compile_for(capability, dtype, 32, (64, 64))
    assert {name for name, _ in compiled} == set(KERNELS["tiled_triton"])
    for name, binary in compiled:
        assert len(binary.asm["cubin"]) > 0
        assert binary.metadata.shared < 32 * 1024, name
        products = dtype != torch.float32 and name != "cut_kernel"
        assert ("mma" in binary.asm["ptx"]) == products


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [16, 32, 128])
def test_every_kernel_of_tables_compiles(compile_for, width, capability):
    partition = logarithmic(15)
    compiled = compile_for(capability, torch.bfloat16, width, (16, 16), partition, "table_triton")
    assert {name for name, _ in compiled} == set(KERNELS["table_triton"])
    for name, binary in compiled:
        assert len(binary.asm["cubin"]) > 0
        assert binary.metadata.shared < 48 * 1024, name
        assert "tt.dot" not in binary.asm["ttir"], name  # Triton makes some of sums of products


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [32, 128])
def test_every_kernel_of_pairs_compiles(compile_for, width, capability):
    compiled = compile_for(
        capability, torch.bfloat16, width, (33, 40), chebyshev(40), "naive_triton"
    )
    assert {name for name, _ in compiled} == set(KERNELS["naive_triton"])
    for name, binary in compiled:
        assert "mma" in binary.asm["ptx"]
        assert binary.metadata.shared < 64 * 1024, name


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("grid", "width", "partition"),
    [((1, 1), 64, chebyshev(1)), ((40, 40), 64, chebyshev(17)), ((1, 90), 16, chebyshev(3))],
)
def test_odd_shapes_compile(compile_for, grid, width, partition, capability):
    for name, binary in compile_for(capability, torch.bfloat16, width, grid, partition):
        assert binary.metadata.shared <= 99 * 1024, name


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(("capability", "wide"), [(80, True), (90, False)])
@pytest.mark.parametrize("partition", [chebyshev(1), NEAR, logarithmic(3), chebyshev(5)])
@pytest.mark.parametrize(("grid", "tiles"), [((14, 16), 0), ((20, 30), 1), ((20, 30), 4)])
def test_slabs_compile(grid, tiles, partition, capability, wide, monkeypatch):
    from triton.runtime.driver import driver

    from ripple_attention.ops import (
        slab_gradients_gluon,
        slabs_gluon,
        tiled_triton,
        triton_support,
    )

    compiled = []
    monkeypatch.setattr(driver, "_active", AbsentGPU(capability))
    for name in SLAB_KERNELS:
        module = slab_gradients_gluon if "gradient" in name else slabs_gluon
        monkeypatch.setattr(module, name, CompileOnly(getattr(module, name), compiled))
    q, k, v = torch.zeros(1, *grid, 3, 2, 32, dtype=torch.bfloat16).unbind(3)
    weights = torch.zeros(1, *grid, 2, partition.num_groups)
    monkeypatch.setattr(slabs_gluon, "_tiles_of_a_strip", lambda *_: tiles)
    radii, whole = list(partition.radii), tiles == 0
    cut = v.new_zeros(0) if whole else v.new_zeros(1, 2, 67, 32)
    assert cut.shape == triton_support.far_sums_like(v, 32, radii).shape
    groups = tiled_triton._padded_groups(len(radii))
    denominator, scaled = weights[..., 0].contiguous(), torch.zeros(1, *grid, 2, groups)
    assert slabs_gluon.serves(whole, radii, q, k, v)
    inputs = q, k, v, weights
    for asked in (denominator, None):
        slabs_gluon.launch_slabs(*inputs, cut, v, asked, radii, 0.0, wide)
    results = denominator, denominator, scaled, q, weights
    slab_gradients_gluon.launch_slab_gradient(v, *inputs, v, denominator, cut, results, radii, wide)
    forward, gradient = SLAB_KERNELS[2:] if whole else SLAB_KERNELS[:2]
    assert [name for name, _ in compiled] == [forward, forward, gradient]
    for _, binary in compiled:
        assert "mma.sync" in binary.asm["ptx"]
        assert binary.metadata.shared <= 56 * 1024  # four programs at a time on an H200


def test_slabs_serve_near_windows_of_32_channels():
    from ripple_attention.ops.slabs_gluon import serves

    x = torch.zeros(1, 9, 16, 1, 48, dtype=torch.bfloat16)
    near, far = x[..., 16:], x[..., 8:40].contiguous()
    for whole in (False, True):
        assert serves(whole, [0, 1, 2, 3], near, near, far)
        assert not serves(whole, [0, 5], far, far, far) and not serves(whole, [0], x, far, far)
        between = torch.zeros(1, 9, 16, 1, 40, dtype=x.dtype)[..., :32]
        for other in (x, far.float(), x[..., 4:36], between):
            assert not serves(whole, [0], far, far, other)
    for grid in ((8, 16), (16, 17)):
        x = torch.zeros(1, *grid, 1, 32, dtype=torch.bfloat16)
        assert serves(False, [0], x, x, x) and not serves(True, [0], x, x, x)
    x = torch.zeros(1, 9, 9, 1, 32, dtype=torch.bfloat16)
    assert serves(True, [3], x, x, x) and not serves(True, [4], x, x, x)  # nothing but the window


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
def test_small_grids_launch_one_kernel_forward_and_two_backward(compile_for):
    names = [name for name, _ in compile_for(90, torch.bfloat16, 32, (14, 14))]
    assert names == list(KERNELS["tiled_triton"][2:])


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_heads_fit_the_smallest_shared_memory(compile_for, dtype):
    for name, binary in compile_for(80, dtype, 128, (64, 64), chebyshev(2)):
        assert binary.metadata.shared <= 99 * 1024, name  # of compute capability 8.6 and 8.9


@pytest.mark.parametrize(("grid", "programs"), [((3, 5), 768), ((31, 37), 768), ((40, 30), 24)])
@interpreted
def test_far_sums_in_gluon_are_exact(grid, programs):
    """With 24 programs they sum two blocks of tokens each, with 768 one."""
    from gluon_on_cpu import launcher

    from ripple_attention.ops import far_triton, slab_parts_gluon, sums_gluon

    k, v = torch.randn(2, *grid, 2, 2, 32, dtype=torch.bfloat16).unbind(3)
    exact = torch.einsum("bhwnm,bhwne->bnem", k.double(), F.pad(v.double(), (0, 1), value=1))
    plain, launched = launcher(slab_parts_gluon, sums_gluon), []

    def counted(kernel, grid, *arguments, **options):
        launched.append(grid)
        plain(kernel, grid, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_gluon, "launch", counted)
        patch.setattr(far_triton, "STATE_PROGRAMS", programs)
        patch.setattr(far_triton, "SUMS", True)
        partial = far_triton._sum_chunks(k, v, k[..., :1])
    tokens = 128 if programs == 768 else 256
    assert launched == [(2, -(-grid[0] * grid[1] // tokens), 2)]
    assert relative_error(partial.sum(2), exact) < 1e-6


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
def test_far_sums_in_gluon_compile(capability, monkeypatch):
    from triton.runtime.driver import driver

    from ripple_attention.ops import far_triton, sums_gluon

    compiled = []
    monkeypatch.setattr(driver, "_active", AbsentGPU(capability))
    monkeypatch.setattr(far_triton, "SUMS", True)
    monkeypatch.setattr(sums_gluon, "sum_kernel", CompileOnly(sums_gluon.sum_kernel, compiled))
    k, v = torch.zeros(1, 64, 64, 2, 2, 32, dtype=torch.bfloat16).unbind(3)
    for programs in (768, 8):
        monkeypatch.setattr(far_triton, "STATE_PROGRAMS", programs)
        far_triton._sum_chunks(k, v, k[..., :1])
    assert len(compiled) == 2
    assert [binary.metadata.shared for _, binary in compiled] == [16 * 1024, 32 * 1024]
    assert all("cp.async.cg" in binary.asm["ptx"] for _, binary in compiled)  # past the cache


@pytest.mark.parametrize(
    ("grid", "partition", "mask_kind", "eps", "tiles"),
    [
        ((17, 16), chebyshev(4), "none", 0.0, 1),
        ((17, 18), chebyshev(5), "rows", 0.5, 2),
        ((50, 9), chebyshev(4), "random", 0.0, 8),
        ((3, 70), logarithmic(3), "random", 0.0, 1),
        ((10, 8), chebyshev(1), "none", 0.5, 4),
        ((16, 16), chebyshev(4), "rows", 0.0, 0),
        ((9, 14), chebyshev(5), "none", 0.5, 0),
    ],
    ids=str,
)
@interpreted
def test_slabs_are_as_precise_as_tiled(grid, partition, mask_kind, eps, tiles):
    """By strips of so many tiles, or as a whole."""
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "heads": 2}
    inputs = make_inputs(grid, partition, **options)
    with slabs_on_the_cpu(tiles) as launched:
        assert_within_twice("tiled", partition, inputs, make_mask(mask_kind, grid), eps)
    assert launched == (SLAB_KERNELS[:2] if tiles else SLAB_KERNELS[2:])


@contextmanager
def slabs_on_the_cpu(tiles):
    """Slabs as NumPy, by strips of so many tiles, or as a whole; gives a list of launches."""
    from gluon_on_cpu import launcher

    from ripple_attention.ops import (
        slab_gradients_gluon,
        slab_parts_gluon,
        slabs_gluon,
        tiled_triton,
    )

    if tiles:
        use_tiles()
    modules = slabs_gluon, slab_gradients_gluon
    plain, launched = launcher(slab_parts_gluon, *modules), []

    def counted(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        plain(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "launch", counted)
        patch.setattr(slabs_gluon, "_tiles_of_a_strip", lambda *_: tiles)
        patch.setattr(tiled_triton, "SLABS", True)
        yield launched


SLAB_GRIDS = [((17, 19), 2), ((16, 14), 0)]  # and tiles of a strip, or none


@pytest.mark.parametrize("eps", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize(("grid", "tiles"), SLAB_GRIDS)
@interpreted
def test_slabs_give_zeros_where_queries_see_dead_keys_alone(grid, tiles, eps):
    partition = chebyshev(4)
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "batch": 1, "heads": 1}
    q, k, v, weights = make_inputs(grid, partition, **options)
    dead = torch.ones(grid, dtype=torch.bool)
    dead[4:7, 9:12] = False
    k[:, dead] = 0
    weights = torch.zeros_like(weights)
    weights[..., -1] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    with slabs_on_the_cpu(tiles) as launched:
        blind = run("tiled_triton", partition, eps=eps)(*leaves)[:, 3:8, 8:13]
        grads = torch.autograd.grad(blind.sum(), leaves)
    assert len(launched) == 2
    assert blind.abs().max() <= (1e-3 if eps == 0.5 else 0)
    assert all(grad.isfinite().all() for grad in grads)
    if eps == 0:
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize(("grid", "tiles"), SLAB_GRIDS)
@interpreted
def test_slabs_keep_the_bits_of_far_sums(grid, tiles):
    """Where high parts of a sum cancel each other: all groups weigh the same, so all is far."""
    from ripple_attention.ops import tiled_triton

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *grid, 3, 1, 32, generator=generator).bfloat16()
    k, v, q = (8 + noise[:, :, :, 0] / 4, 8 + noise[:, :, :, 1] / 4, 0 * noise[:, :, :, 2])
    q[..., 0], q[..., 5] = 1, -1
    weights = torch.ones(1, *grid, 1, 5).bfloat16()
    upstream = torch.zeros_like(v)
    upstream[..., 3], upstream[..., 4] = 1, -1
    sums = torch.einsum("bhwnm,bhwne->bnme", k.double(), v.double())[:, None, None]
    ones = k.double().sum((1, 2))[:, None, None]
    radii = [0, 1, 2, 3]
    with slabs_on_the_cpu(tiles) as launched:
        out, below, cut = tiled_triton.tiled_triton_forward(q, k, v, weights, radii, 0.5)
        unit = torch.ones_like(below)
        grad = tiled_triton.tiled_triton_backward(
            upstream, q, k, v, weights, torch.zeros_like(out), unit, cut, radii
        )[0]
    assert len(launched) == 2
    exact = (ones[..., 0] - ones[..., 5] + 0.5).expand_as(below)
    assert relative_error(below, exact) < 1e-5
    numerator = (sums[..., 0, :] - sums[..., 5, :]).expand(out.shape)
    assert relative_error(out * below.unsqueeze(-1), numerator) < 0.2  # of 16 bits; of 8, 17
    assert relative_error(grad, (sums[..., 3] - sums[..., 4]).expand(grad.shape)) < 2e-2


@interpreted
def test_whole_slabs_are_precise_where_a_window_is_taken_out():
    """Most of the mass in the window, most of the weight in the rest."""
    grid, partition = (9, 14), chebyshev(5)
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16, "heads": 1}
    q, k, v, weights = make_inputs(grid, partition, **options)
    k[:, :, 9:] *= 0.02
    weights = torch.cat([0.01 * weights[..., :-1], torch.ones_like(weights[..., -1:])], -1)
    with slabs_on_the_cpu(0) as launched:
        assert_within_twice("tiled", partition, (q, k, v, weights))
    assert launched == SLAB_KERNELS[2:]
