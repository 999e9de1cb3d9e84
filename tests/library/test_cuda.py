"""The same promises on a GPU. Skipped, visibly, where there is none."""

from functools import partial
from itertools import product
from random import Random

import pytest
import torch

from inputs import (
    assert_sees_all_that_lives,
    gradient_layouts,
    gradients,
    make_inputs,
    make_mask,
    relative_error,
)
from kernels import run
from ripple_attention import (
    LinearAttention,
    Partition,
    RippleAttention,
    chebyshev,
    foveal,
    logarithmic,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IMPLEMENTATIONS = ["naive", "table", "tiled", "tile_sums"]
MANY_STICKS = partial(RippleAttention, max_distance=9)


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("mask_kind", ["none", "rows"])
@pytest.mark.parametrize("grid", [(1, 1), (7, 5), (33, 20)])
@pytest.mark.parametrize("partition", [chebyshev(4), chebyshev(40), logarithmic(9)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_the_definition_on_the_cpu(implementation, partition, grid, mask_kind, eps):
    inputs, mask = make_inputs(grid, partition), make_mask(mask_kind, grid)
    expected = gradients(run("naive", partition, mask, eps), inputs)
    mask = mask if mask is None else mask.cuda()
    got = gradients(run(implementation, partition, mask, eps), tuple(x.cuda() for x in inputs))
    for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert relative_error(ours.cpu(), reference) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiled_error_is_within_twice_naives_at_the_same_precision(dtype):
    partition = chebyshev(4)
    inputs = make_inputs((33, 20), partition, dtype=dtype, features=16, value_dim=8)
    inputs = tuple(x.cuda() for x in inputs)
    exact = gradients(run("naive", partition), tuple(x.double() for x in inputs))
    naive = gradients(run("naive", partition), inputs)
    tiled = gradients(run("tiled", partition), inputs)
    for ours, theirs, reference in zip(
        (tiled[0], *tiled[1]), (naive[0], *naive[1]), (exact[0], *exact[1]), strict=True
    ):
        rounding = torch.finfo(dtype).eps
        assert relative_error(ours, reference) <= 2 * relative_error(theirs, reference) + rounding


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("implementation", ["table", "tiled", "table_triton"])
def test_on_large_grids_queries_see_all_that_lives_and_no_more(implementation, group):
    assert_sees_all_that_lives(partial(run, implementation), group, "cuda")


def assert_budget(ours, plain, exact, further=(0.0,) * 5):
    """An error of at most twice PyTorch's, of the output and the gradients of q, k, v, weights.

    Further: errors that PyTorch does not make, but that count as if it did.
    """
    results = zip(*((x[0], *x[1]) for x in (ours, plain, exact)), further, strict=True)
    for index, (got, theirs, reference, more) in enumerate(results):
        rounding = torch.finfo(got.dtype).eps
        if got[0, ..., 0, 0].numel() == 1 and index in (1, 2, 4):
            # An only token: zero, as differences of sums over channels, in PyTorch by luck exactly.
            rounding = torch.finfo(torch.float32).eps * ours[0].shape[-1] + rounding
        error = relative_error(theirs, reference) + more
        assert relative_error(got, reference) <= 2 * error + rounding


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 32, 48, 64, 128])
@pytest.mark.parametrize(
    ("grid", "partition"),
    [
        ((1, 1), chebyshev(1)),
        ((14, 14), chebyshev(4)),
        ((33, 20), logarithmic(3)),
        ((30, 41), chebyshev(17)),
        ((64, 64), chebyshev(4)),
    ],
)
def test_triton_error_is_within_twice_tileds(grid, partition, width, dtype, eps):
    inputs = make_inputs(
        grid, partition, dtype=dtype, features=width, value_dim=width, batch=1, heads=3
    )
    inputs = tuple(x.cuda() for x in inputs)
    exact = gradients(run("tiled", partition, eps=eps), tuple(x.double() for x in inputs))
    tiled = gradients(run("tiled", partition, eps=eps), inputs)
    ours = gradients(run("tiled_triton", partition, eps=eps), inputs)
    again = gradients(run("tiled_triton", partition, eps=eps), inputs)
    assert_budget(ours, tiled, exact)
    for got, repeated in zip((ours[0], *ours[1]), (again[0], *again[1]), strict=True):
        assert torch.equal(got, repeated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "widths", [(9, 36), (15, 50), (24, 50), (32, 64), (64, 32), (40, 64), (16, 128)], ids=str
)
@pytest.mark.parametrize("partition", [Partition((7,)), Partition((6, 8))])
def test_features_may_be_fewer_than_values_and_more(partition, widths, dtype):
    features, value_dim = widths
    inputs = make_inputs(
        (31, 29), partition, dtype=dtype, features=features, value_dim=value_dim, batch=1
    )
    assert_within_twice("tiled", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(16, 64), (32, 32), (32, 64), (64, 16), (64, 32), (64, 64)])
@pytest.mark.parametrize("reach", range(17))
def test_every_reach(reach, widths, dtype):
    """Each compiles to kernels of its own, which a compiler can get wrong one by one."""
    from ripple_attention.ops.tiling import is_single_window

    features, value_dim = widths
    grid, partition = (41, 43), Partition((reach,))
    assert not is_single_window(*grid, [reach])
    options = {"dtype": dtype, "features": features, "value_dim": value_dim, "batch": 1}
    inputs = make_inputs(grid, partition, **options)
    assert_within_twice("tiled", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.fixture
def poisoned_shared_memory(monkeypatch):
    """Whatever a kernel reads of shared memory that it has not written is NaN."""
    from ripple_attention.ops.kernels import launch

    plain, poison = launch._launch_once, torch.full((4096, 4096), torch.nan, device="cuda")
    poison = poison.bfloat16()

    def launch_once(*arguments):
        torch.mm(poison, poison)  # its tiles fill the memory of every multiprocessor
        plain(*arguments)

    monkeypatch.setattr(launch, "_launch_once", launch_once)


EIGHTS = range(8, 129, 8)
ODD_WIDTHS = (1, 5, 9, 13, 20, 31, 33, 36, 50, 63, 65, 100, 127)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_shared_memory")
@pytest.mark.parametrize(
    "widths",
    [*product(EIGHTS, EIGHTS), *product(ODD_WIDTHS, (5, 31, 36, 50, 64, 127))],
    ids=str,
)
def test_every_width(widths):
    """Each compiles to kernels of its own, and ptxas 12.8 made some of them wrong."""
    partition, (features, value_dim) = Partition((7,)), widths
    options = {"features": features, "value_dim": value_dim, "batch": 1}
    inputs = make_inputs((31, 29), partition, dtype=torch.bfloat16, **options)
    assert_within_twice("tiled", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_takes_strided_views_without_copies(dtype):
    partition, grid = chebyshev(4), (50, 70)
    q, k, v = torch.rand(2, *grid, 3, 6, 32, device="cuda", dtype=dtype).unbind(3)
    weights = torch.rand(2, *grid, 6, 5, device="cuda")
    contiguous = tuple(x.contiguous() for x in (q, k, v))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run("tiled_triton", partition)(q, k, v, weights)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * v.numel() * v.element_size() + 2**22
    assert torch.equal(out, run("tiled_triton", partition)(*contiguous, weights))


@pytest.mark.parametrize("name", ["tiled_triton", "table_triton", "naive_triton"])
def test_gradients_are_laid_out_as_compiled_code_expects(name):
    partition = logarithmic(15)
    options = {"features": 32, "value_dim": 32, "dtype": torch.bfloat16}
    inputs = tuple(x.cuda() for x in make_inputs((24, 24), partition, **options))
    got, expected = gradient_layouts(name, inputs, list(partition.radii))
    assert got == expected


def test_both_passes_take_at_most_twice_the_inputs_memory():
    """Output and gradients among them."""
    partition, shape = chebyshev(4), (4, 128, 128, 6, 32)
    inputs = [torch.rand(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    inputs.append(torch.rand(*shape[:-1], 5, device="cuda").softmax(-1))
    inputs = [x.requires_grad_() for x in inputs]
    upstream = torch.rand(shape, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run("tiled_triton", partition)(*inputs)
    torch.autograd.grad(out, inputs, upstream)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 2 * sum(x.numel() * x.element_size() for x in inputs)


def test_a_kernel_for_aligned_memory_is_not_taken_for_other():
    partition, shape = chebyshev(4), (1, 50, 70, 3, 6, 32)
    size = torch.Size(shape).numel()
    memory = torch.rand(size + 1, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(1, 50, 70, 6, 5, device="cuda")
    for start in (0, 1, 0):
        q, k, v = memory[start : start + size].view(shape).unbind(3)
        exact = run("tiled", partition)(*(x.double() for x in (q, k, v, weights)))
        assert relative_error(run("tiled_triton", partition)(q, k, v, weights), exact) < 5e-3


def effect_of_a_rounded_output(partition, inputs, mask, eps, out):
    """How far gradients move, as `relative_error` counts, where ∂o·o takes a rounded output.

    The kernels' gradients take the output as it is stored. Where all keys that a query sees are in
    one group, ∂α is zero as a difference of such numbers, divided by weights as small as may be.
    """
    wide = [x.detach().double().requires_grad_() for x in inputs]
    generator = torch.Generator().manual_seed(2)  # that of `gradients`
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(inputs[0])
    rounding = torch.finfo(inputs[0].dtype).eps / 2
    moved = rounding * (upstream.double() * out).square().sum(-1, True).sqrt()
    moved *= torch.randn(moved.shape, generator=generator, dtype=torch.float64).to(moved)
    ones = torch.ones_like(wide[2][..., :1])
    share = run("naive", partition, mask, 1.0)(wide[0], wide[1], ones, wide[3])  # den/(den + 1)
    denominator = (share / (1 - share)).detach()
    pull = moved * (denominator + 1) ** 2 / (denominator + eps).clamp(min=1e-30)
    grads = torch.autograd.grad(share, (wide[0], wide[1], wide[3]), pull * (denominator > 0))
    exact = gradients(run("naive", partition, mask, eps), tuple(x.detach() for x in wide))[1]
    pairs = zip(grads, (exact[0], exact[1], exact[3]), strict=True)
    of_q, of_k, of_weights = (float(g.norm() / e.norm().clamp(min=1)) for g, e in pairs)
    return 0.0, of_q, of_k, 0.0, of_weights


def assert_within_twice(name, partition, inputs, mask=None, eps=0.0, further=(0.0,) * 5):
    """The error of a kernel is at most twice that of the same algorithm in PyTorch."""
    exact = gradients(run(name, partition, mask, eps), tuple(x.double() for x in inputs))
    plain = gradients(run(name, partition, mask, eps), inputs)
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        ours = gradients(run(f"{name}_triton", partition, mask, eps), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_budget(ours, plain, exact, further)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(5, 5), (4, 30), (13, 23), (32, 32), (128, 128)], ids=str)
@pytest.mark.parametrize(
    ("grid", "partition"),
    [((1, 1), chebyshev(1)), ((33, 20), chebyshev(32)), ((64, 48), logarithmic(63))],
)
def test_triton_tables_are_within_twice_tables_error(grid, partition, widths, dtype):
    features, value_dim = widths
    inputs = make_inputs(
        grid, partition, dtype=dtype, features=features, value_dim=value_dim, batch=1
    )
    assert_within_twice("table", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 32, 128])
@pytest.mark.parametrize(
    ("grid", "partition"), [((33, 20), chebyshev(32)), ((64, 48), logarithmic(63))]
)
def test_triton_pairs_are_within_twice_naives_error(grid, partition, width, dtype):
    inputs = make_inputs(grid, partition, dtype=dtype, features=width, value_dim=width, batch=1)
    assert_within_twice("naive", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 32, 64, 128])
@pytest.mark.parametrize("grid", [(1, 1), (14, 14), (33, 20), (64, 72)])
@pytest.mark.parametrize(
    "partition", [foveal(), foveal(2, 16, 2), logarithmic(63), Partition((0, 9, 30))], ids=str
)
def test_triton_shared_sums_are_within_twice_tile_sums_error(partition, grid, width, dtype):
    inputs = make_inputs(grid, partition, dtype=dtype, features=width, value_dim=width, batch=1)
    assert_within_twice("tile_sums", partition, tuple(x.cuda() for x in inputs), eps=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 20))
def test_a_thousand_random_cases(first):
    random = Random(first)
    for case in range(first, first + 20):
        name = random.choice(["tiled", "tiled", "tiled", "table", "naive"])
        radii = sorted(random.sample(range(17 if name == "tiled" else 30), random.randint(1, 6)))
        partition = Partition(radii)
        grid = (random.randint(1, 40), random.randint(1, 40))
        dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
        mask = make_mask(random.choice(["none", "none", "random", "rows"]), grid)
        inputs = make_inputs(
            grid,
            partition,
            heads=random.randint(1, 3),
            features=random.randint(2, 70),
            value_dim=random.randint(1, 70),
            dtype=dtype,
            seed=case,
        )
        inputs = tuple(x.cuda() for x in inputs)
        if random.random() < 0.3:  # channels first in memory
            inputs = tuple(
                x.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0) for x in inputs
            )
        mask, eps = mask if mask is None else mask.cuda(), random.choice([0.0, 0.5])
        out = run("naive", partition, mask, eps)(*(x.double() for x in inputs))
        further = effect_of_a_rounded_output(partition, inputs, mask, eps, out)
        assert_within_twice(name, partition, inputs, mask, eps, further)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "grid", "width", "features", "sticks"),
    [
        (8, (128, 128), 32, 32, 4),  # several blocks of tokens in a chunk, of every type
        (8, (128, 128), 32, 32, 9),
        (2, (30, 33), 64, 64, 9),
        (2, (30, 33), 64, 16, 4),
        (2, (30, 33), 48, 24, 4),
        (2, (30, 33), 16, 64, 4),
    ],
)
def test_sums_of_the_front_are_precise_and_repeat(
    batch, grid, width, features, sticks, dtype, masked
):
    from ripple_attention.ops.kernels.qkv_features import (
        FeatureOptions,
        FeatureParameters,
        qkv_features_forward,
    )

    torch.manual_seed(0)
    qkv = torch.randn(batch, *grid, 3, 6, width, device="cuda").to(dtype)
    mask = make_mask("rows", grid).cuda()[:1].expand(batch, -1, -1) if masked else None
    sizes = [(width, width), (features, 2 * width), (features,), (width, width), (width,)]
    parameters = [0.3 * torch.randn(x, device="cuda") for x in (*sizes, (6, sticks, width))]
    options = FeatureOptions("relu", "unit", True, True, False, 0.001)
    arguments = (*qkv.unbind(3), FeatureParameters(*parameters), options, sticks + 1, mask)
    *expected, _ = qkv_features_forward(*arguments)
    values = torch.nn.functional.pad(qkv[:, :, :, 2].double(), (0, 1), value=1.0)
    exact = torch.einsum("bhwne,bhwnm->bnem", values, expected[1].double())
    first = None
    allowed = 2e-6 if dtype == torch.float32 else 1e-5  # tensor cores drop bits of their sums
    for _ in range(3):
        *got, shares = qkv_features_forward(*arguments, sums=True)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        rounding = torch.finfo(torch.float32).eps  # as another kernel is compiled for it
        assert relative_error(got[2], expected[2]) < rounding
        assert relative_error(shares.sum(2), exact) < allowed
        first = shares if first is None else first
        assert torch.equal(shares, first)
    if width == 32:
        assert shares.shape[2] * 64 < grid[0] * grid[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (14, 14), (40, 50)])
@pytest.mark.parametrize("kind", [RippleAttention, MANY_STICKS, LinearAttention])
def test_fused_layers_are_as_precise_as_plain_ones(kind, grid, masked, dtype):
    torch.manual_seed(0)
    layer = kind(192, num_heads=6).cuda()
    x = torch.randn(2, *grid, 192, device="cuda")
    mask = make_mask("rows", grid).cuda() if masked else None

    def results(fuse, dtype):
        layer.fuse = fuse
        inputs = x.detach().requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            out = layer(inputs, key_padding_mask=mask)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return out.detach(), *torch.autograd.grad(out, (inputs, *layer.parameters()), upstream)

    assert layer.explain(x) == "fused"
    ours, plain = results(True, dtype), results(False, dtype)
    layer, x = layer.double(), x.double()
    exact = results(False, torch.float32)
    rounding = torch.finfo(dtype).eps
    for got, theirs, reference in zip(ours, plain, exact, strict=True):
        assert relative_error(got, reference) <= 2 * relative_error(theirs, reference) + rounding


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition": "logarithmic", "max_distance": 40},
        {"weights": "softmax"},
        {"weights": "fixed"},
        *({"implementation": name} for name in (*IMPLEMENTATIONS, "table_triton", "naive_triton")),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", [14, 64])
def test_a_layer_runs_as_a_cuda_graph(side, options):
    torch.manual_seed(0)
    layer = RippleAttention(192, num_heads=6, **options).cuda().bfloat16().eval()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(2, side, side, 192, device="cuda", dtype=torch.bfloat16)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("grid", [(16, 16), (64, 64)])
@pytest.mark.parametrize("kind", [RippleAttention, MANY_STICKS, LinearAttention])
def test_kernels_that_start_early_find_what_they_read(kind, grid, monkeypatch):
    """Replayed, with nothing between them, bit for bit what they give one after the other.

    Inputs change from run to run: what is read too early is of the one before.
    """
    from ripple_attention.ops.kernels import far, qkv_features, window

    torch.manual_seed(0)
    layer = kind(192, num_heads=6).cuda()
    inputs, upstream = torch.randn(3, 16, *grid, 192, device="cuda").split((2, 1))
    x = inputs[0].clone().requires_grad_()

    def results():
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), upstream[0])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles kernels
        results()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        early = results()
    found = []
    for run_number in range(6):
        x.data.copy_(inputs[run_number % 2])
        torch.cuda.synchronize()
        graph.replay()
        found.append([y.clone() for y in early])
    for module in (far, qkv_features, window):
        monkeypatch.setattr(module, "overlaps", lambda: False)
        monkeypatch.setattr(module, "overlapping", dict, raising=False)
    for run_number, some in enumerate(found):
        x.data.copy_(inputs[run_number % 2])
        for ours, reference in zip(some, results(), strict=True):
            assert torch.equal(ours, reference)


def test_triton_serves_grids_beyond_two_to_the_31_numbers():
    partition = chebyshev(4)
    qkv = torch.rand(1, 512, 512, 3, 24, 128, device="cuda", dtype=torch.bfloat16)  # 2.4e9 numbers
    weights = torch.rand(1, 512, 512, 24, 5, device="cuda")
    out = run("tiled_triton", partition)(*qkv.unbind(3), weights)
    head = tuple(x[:, :, :, -1:].float() for x in (*qkv.unbind(3), weights))
    assert relative_error(out[:, :, :, -1:], run("tiled", partition)(*head)) < 4e-3


def test_auto_takes_the_triton_kernels():
    inputs = make_inputs((20, 20), chebyshev(4), dtype=torch.bfloat16, features=16)
    inputs = tuple(x.cuda() for x in inputs)
    auto, triton = (run(name, chebyshev(4))(*inputs) for name in ("auto", "tiled_triton"))
    assert torch.equal(auto, triton)


def test_a_compiled_layer_trains_under_autocast():
    torch.manual_seed(0)
    layer = RippleAttention(48, num_heads=3).cuda()
    x = torch.randn(2, 20, 30, 48, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        expected, got = layer(x), compiled(x)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, expected) < 2e-2
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
