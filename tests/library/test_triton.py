"""The Triton kernels: run by Triton's interpreter on a CPU, and compiled for GPUs not present."""

import importlib
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from inputs import gradient_layouts, gradients, make_inputs, make_mask, relative_error
from kernels import (
    HERE,
    assert_within_twice,
    compile_only,
    disassemble,
    interpreted,
    needs_triton,
    run,
    unwritten_registers,
    use_tiles,
)
from ripple_attention import (
    Partition,
    RippleAttention,
    chebyshev,
    dispatch,
    logarithmic,
    modules,
)
from ripple_attention.dispatch import Problem

pytestmark = needs_triton

NEAR = chebyshev(4)
KERNELS = {
    "tiled_triton": (
        "state_kernel",
        "split_state_kernel",
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


FILES = {"tiled_triton": "window", "table_triton": "boxes", "naive_triton": "pairs"}

SINGLE_WINDOW = [  # grid, partition, M, E, mask, eps
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
@pytest.mark.parametrize("case", range(len(SINGLE_WINDOW)))
@interpreted
def test_small_grids_are_as_precise_as_tiled(case, dtype):
    grid, partition, M, E, mask_kind, eps = SINGLE_WINDOW[case]
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


@interpreted
def test_a_table_shows_small_keys_among_large_ones_and_no_dead_ones():
    partition, grid = Partition((0, 9)), (48, 48)
    q, k, v, weights = make_inputs(grid, partition, batch=1, heads=1, dtype=torch.float32)
    sizes = torch.tensor([0.0, 1.0, 1000.0])
    pattern = torch.randint(3, grid, generator=torch.Generator().manual_seed(0))
    q, k = torch.ones_like(q), sizes[pattern].view(1, *grid, 1, 1).expand_as(k)
    weights.zero_()[..., 0] = 1
    out = run("table_triton", partition)(q, k, torch.ones_like(v), weights)[0, :, :, 0]
    assert (out[pattern == 0] == 0).all()
    assert (out[pattern > 0] - 1).abs().max() < 0.05


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


@pytest.mark.parametrize("name", ["tiled_triton", "table_triton", "naive_triton"])
@interpreted
def test_gradients_are_laid_out_as_compiled_code_expects(name):
    partition = chebyshev(3)
    inputs = make_inputs((5, 4), partition, dtype=torch.float32)
    got, expected = gradient_layouts(name, inputs, list(partition.radii))
    assert got == expected


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


@pytest.mark.parametrize("implementation", ["auto", "naive", "tiled_triton"])
@interpreted
def test_few_functions_stand_before_the_first_operator_of_a_layer(implementation):
    layer = RippleAttention(16, num_heads=2, max_distance=2, implementation=implementation)
    x, home = torch.randn(1, 4, 5, 16), str(Path(modules.__file__).parent)
    layer(x)
    before, operators = [], []

    def note(frame, event, called):
        if event == "call" and not operators and frame.f_code.co_filename.startswith(home):
            before.append(frame.f_code.co_name)
        elif event == "c_call" and called is F.linear:
            operators.append(called)

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert operators and len(before) <= 12, before


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
    def problem(partition, dtype, side):
        reason = dispatch.kernels_can_run("cuda")
        return Problem((side, side), 32, 32, partition.radii, dtype, "cuda", reason)

    def choice(capability, partition=NEAR, dtype=torch.bfloat16, side=64):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        dispatch._machine.cache_clear()
        return dispatch.choose(problem(partition, dtype, side))

    assert choice((9, 0)) == choice((8, 0)) == "tiled_triton"
    assert choice((7, 5)) == "tiled"
    assert choice((7, 5), Partition((0, 40))) == "table"
    assert choice((9, 0), dtype=torch.float64) == "tiled"
    assert choice((9, 0), chebyshev(40)) == "naive_triton"
    assert choice((9, 0), chebyshev(40), side=129) == "tiled"
    assert choice((9, 0), chebyshev(40), dtype=torch.float32) == "tiled"
    assert choice((9, 0), Partition((0, 40)), side=129) == "table_triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    dispatch._machine.cache_clear()
    assert dispatch.kernels_can_run("cuda") == (
        "needs a GPU of compute capability 8.0 or newer; got (7, 5)"
    )
    dispatch._machine.cache_clear()
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    assert "needs triton, which is not installed" in dispatch.kernels_can_run("cuda")
    dispatch._machine.cache_clear()


def test_only_a_launch_like_an_earlier_one_skips_the_search(monkeypatch):
    from triton.compiler import CompiledKernel

    from ripple_attention.ops.kernels import launch

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

    def compile_all(
        capability, dtype, width, grid, partition=NEAR, name="tiled_triton", features=None
    ):
        module = importlib.import_module(f"ripple_attention.ops.kernels.{FILES[name]}")
        far = importlib.import_module("ripple_attention.ops.kernels.far")
        compiled = compile_only(monkeypatch, capability, KERNELS[name], module, far)
        q, k, v = torch.zeros(1, *grid, 3, 2, width, dtype=dtype).unbind(3)
        if features:
            q, k = torch.zeros(1, *grid, 2, 2, features, dtype=dtype).unbind(3)
        weights = torch.zeros(1, *grid, 2, partition.num_groups)
        radii = list(partition.radii)
        forward, backward = (getattr(module, f"{name}_{way}") for way in ("forward", "backward"))
        results = forward(q, k, v, weights, radii, 0.0)
        backward(results[0], q, k, v, weights, *results, radii)
        return compiled

    return compile_all


def test_vectors_promise_nothing():
    from ripple_attention.ops.kernels.vector_flags import strip_promises

    before = """
  %1 = shl nuw nsw <2 x i32> %0, <i32 28, i32 1>
  %2 = or disjoint <4 x i32> %1, splat (i32 -8)
  %3 = lshr exact <2 x i32> %1, splat (i32 2)
  %6 = icmp samesign ult <2 x i32> %3, splat (i32 9)
  %4 = add nsw i32 %x, 1
  %5 = fadd nnan <2 x float> %y, %y
"""
    after = """
  %1 = shl <2 x i32> %0, <i32 28, i32 1>
  %2 = or <4 x i32> %1, splat (i32 -8)
  %3 = lshr <2 x i32> %1, splat (i32 2)
  %6 = icmp ult <2 x i32> %3, splat (i32 9)
  %4 = add nsw i32 %x, 1
  %5 = fadd nnan <2 x float> %y, %y
"""
    assert strip_promises(before) == after


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
def test_kernels_are_compiled_without_promises_of_vectors(compile_for, monkeypatch, tmp_path):
    """Among them the one that Triton 3.6 made wrong: reach 8, 64 features, 32 value channels. Nor
    are those taken that were compiled with promises, and lie in the cache on disk."""
    from triton import knobs

    from ripple_attention.ops.kernels import launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    promise = re.compile(r"(nuw|nsw|disjoint|exact|nneg) <\d+ x i|samesign \w+ <")
    found = []
    for context in (nullcontext, launch.stripped_promises):
        monkeypatch.setattr(launch, "stripped_promises", context)
        compiled = compile_for(90, torch.float16, 32, (31, 29), Partition((8,)), features=64)
        found.append(any(promise.search(binary.asm["llir"]) for _, binary in compiled))
        assert knobs.runtime.add_stages_inspection_hook is None
        assert knobs.cache.dir == str(tmp_path)
    assert found == [True, False]
    for _, binary in compiled:  # two lanes in one number, what Triton 3.6 made of it
        assert not re.search(r"mov\.b64 \s*\{_, %r\d+\}", binary.asm["ptx"])


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
def test_threads_compile_one_after_the_other():
    from triton import knobs

    from ripple_attention.ops.kernels.vector_flags import stripped_promises

    inside, together = [], Barrier(2)

    def compile_something():
        together.wait()
        with stripped_promises():
            inside.append(knobs.runtime.add_stages_inspection_hook)
            time.sleep(0.05)
            assert knobs.runtime.add_stages_inspection_hook is inside[-1]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(compile_something) for _ in range(2)]:
            done.result()
    assert len(set(inside)) == 2 and None not in inside
    assert knobs.runtime.add_stages_inspection_hook is None


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_compiles(compile_for, dtype, capability):
    compiled = compile_for(capability, dtype, 32, (64, 64))
    assert {name for name, _ in compiled} == set(KERNELS["tiled_triton"])
    for name, binary in compiled:
        assert len(binary.asm["cubin"]) > 0
        assert binary.metadata.shared < 32 * 1024, name
        products = dtype != torch.float32 and name != "split_state_kernel"
        assert ("mma" in binary.asm["ptx"]) == products


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(("width", "capability"), [(16, 80), (128, 80), (32, 90), (128, 90)])
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


def test_a_register_that_is_read_before_it_is_written_is_found():
    """As ptxas 12.8.93 makes it of 24 features, 50 value channels and tiles of 64 queries."""
    wrong = """
        /*0070*/                   ULDC.64 UR12, c[0x0][0x208] ;
        /*45e0*/                   USHF.R.U32.HI UR18, URZ, 0x4, UR12 ;
        /*4600*/                   UIADD3 UR14, UP0, UR4, 0x40, URZ ;
        /*4690*/                   UIADD3 UR16, UP1, UR18, 0x2, URZ ;
        /*46b0*/                   UIADD3 UR4, UR13, 0x4000, URZ ;
        /*4730*/                   USGXT.U32 UR15, UR4, 0xe ;
        /*4840*/              @!P0 LDG.E.128 R8, desc[UR12][R24.64] ;
        /*8a50*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
        /*8ad0*/                   HGMMA.64x32x16.F32.BF16 R24, R8, gdesc[UR12].tnspB, R24, gsb0 ;
        /*8b10*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16].tnspB, R24 ;
"""
    first, second = unwritten_registers(wrong)
    assert first.startswith("UIADD3 UR14, UP0, UR4")
    assert second.startswith("HGMMA") and "UR16" in second  # UR17 and UR19 hold nothing


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("features", "value_dim"),
    [
        *((24, 50), (64, 64)),
        *(
            pytest.param(features, value_dim, marks=pytest.mark.slow)
            for features in (9, 13, *range(8, 65, 8))
            for value_dim in (31, 36, *range(8, 65, 8))
        ),
    ],
)
def test_machine_code_reads_no_register_before_it_is_written(compile_for, features, value_dim):
    options = {"partition": Partition((7,)), "features": features}
    products = 0
    for name, binary in compile_for(90, torch.bfloat16, value_dim, (31, 29), **options):
        code = disassemble(binary)
        products += "HGMMA" in code
        assert "EXIT" in code and not unwritten_registers(code), name
    assert products or max(features, value_dim) <= 32


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
def test_small_grids_launch_one_kernel_forward_and_two_backward(compile_for):
    names = [name for name, _ in compile_for(90, torch.bfloat16, 32, (14, 14))]
    assert names == list(KERNELS["tiled_triton"][2:])


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_heads_fit_the_smallest_shared_memory(compile_for, dtype):
    for name, binary in compile_for(80, dtype, 128, (64, 64), chebyshev(2)):
        assert binary.metadata.shared <= 99 * 1024, name  # of compute capability 8.6 and 8.9
