"""What the operator promises around its numbers: refusals, types, compilation and export."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from inputs import gradient_layouts, gradients, make_inputs, relative_error
from ripple_attention import (
    Partition,
    RippleAttention,
    chebyshev,
    dispatch,
    explain,
    foveal,
    linear_attention,
    logarithmic,
    ripple_attention,
    ripple_softmax_attention,
)
from ripple_attention.dispatch import Problem

PARTITION = chebyshev(3)
FAST = ["table", "tiled", "tile_sums"]
ALL = ["naive", *FAST]


@pytest.fixture
def good():
    q, k, v, weights = make_inputs((4, 5), PARTITION, dtype=torch.float32)
    mask = torch.zeros(2, 4, 5, dtype=torch.bool)
    return {"q": q, "k": k, "v": v, "spatial_weights": weights, "key_padding_mask": mask}


BAD = {
    "wrong rank": (lambda x: {"q": x["q"][0]}, "heads-last grids .*got q.shape=.*unflatten"),
    "unequal grids": (lambda x: {"k": x["k"][:, :3]}, r"same shape .*got q.shape=.*k.shape=\(2, 3"),
    "unequal heads": (lambda x: {"v": x["v"][..., :1, :]}, "batch, grid and heads .*got"),
    "unequal widths": (lambda x: {"q": x["q"][..., :2]}, "same shape"),
    "too few weights": (
        lambda x: {"spatial_weights": x["spatial_weights"][..., :3]},
        r"G=4 groups, so \(2, 4, 5, 2, 4\); got spatial_weights.shape=\(2, 4, 5, 2, 3\)",
    ),
    "integer tensors": (lambda x: {n: x[n].int() for n in "qkv"}, "floating-point.*got .*int32"),
    "mixed types": (lambda x: {"q": x["q"].double()}, "one floating-point type.*torch.autocast"),
    "weights of another type": (
        lambda x: {"spatial_weights": x["spatial_weights"].double()},
        "type of v or .*float32; got spatial_weights.dtype=torch.float64",
    ),
    "mask of another shape": (
        lambda x: {"key_padding_mask": x["key_padding_mask"].flatten(1)},
        r"must be bool \(B, H, W\) = \(2, 4, 5\).*got .*\(2, 20\)",
    ),
    "mask of another type": (
        lambda x: {"key_padding_mask": x["key_padding_mask"].float()},
        "must be bool .*got mask.dtype=torch.float32.*bool()",
    ),
    "not a partition": (lambda x: {"partition": 4}, "must be a Partition; got 4. Use chebyshev"),
    "unknown implementation": (
        lambda x: {"implementation": "cuda"},
        "must be one of 'auto', 'naive', 'table', 'tiled', .*'naive_triton'; got .*='cuda'",
    ),
    "negative eps": (lambda x: {"eps": -0.5}, "eps.* must be a finite number ≥ 0; got eps=-0.5. 0"),
    "eps that is not a number": (lambda x: {"eps": float("nan")}, "finite number ≥ 0; got eps=nan"),
    "infinite eps": (lambda x: {"eps": float("inf")}, "finite number ≥ 0; got eps=inf"),
    "a tensor as eps": (lambda x: {"eps": torch.ones(1)}, "finite number ≥ 0; got eps=tensor"),
    "arrays": (lambda x: {"q": x["q"].numpy()}, "must be a dense tensor; got .*from_numpy"),
    "a list as mask": (lambda x: {"key_padding_mask": [True]}, "must be a bool tensor"),
    "another device": (lambda x: {"q": x["q"].to("meta")}, "on one device; got"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_rule_and_what_came(case, good):
    change, message = BAD[case]
    arguments = {"partition": PARTITION, **good, **change(good)}
    q, k, v, weights = (arguments.pop(name) for name in ("q", "k", "v", "spatial_weights"))
    with pytest.raises(ValueError, match=message):
        ripple_attention(q, k, v, weights, **arguments)


@pytest.mark.parametrize("implementation", ["auto", *ALL])
def test_good_input_is_taken(implementation, good):
    q, k, v, weights, mask = good.values()
    ripple_attention(
        q, k, v, weights, partition=PARTITION, key_padding_mask=mask, implementation=implementation
    )


def test_the_other_operators_check_too(good):
    q, k, v, weights, mask = good.values()
    with pytest.raises(ValueError, match="same shape"):
        linear_attention(q, k[:1], v)
    with pytest.raises(ValueError, match="must be bool"):
        linear_attention(q, k, v, key_padding_mask=mask.int())
    with pytest.raises(ValueError, match="finite number ≥ 0; got eps=-1"):
        linear_attention(q, k, v, eps=-1)
    with pytest.raises(ValueError, match="G=4 groups"):
        ripple_softmax_attention(q, k, v, weights[..., 1:], partition=PARTITION)


def chosen(side, partition):
    """What "auto" takes on a CPU, for a square grid and heads of 32."""
    return dispatch.choose(
        Problem(
            (side, side), 32, 32, partition.radii, torch.float32, "cpu", "no GPU",
            tile_radii=partition.tile_radii,
        )
    )  # fmt: skip


def test_auto_takes_tiles_for_small_reach_and_shared_sums_for_wide_groups():
    for side in (7, 14, 64, 256):
        assert chosen(side, chebyshev(4)) == "tiled"
    assert chosen(14, logarithmic(14)) == "tiled"
    assert chosen(128, logarithmic(63)) == chosen(256, logarithmic(128)) == "tile_sums"
    assert chosen(128, foveal()) == "tile_sums"


def test_auto_runs_what_explain_says(good, capsys):
    q, k, v, weights, _ = good.values()
    told = explain(q, k, v, weights, partition=PARTITION)
    assert f"{told:16} runs: " in capsys.readouterr().out
    run = lambda name: ripple_attention(q, k, v, weights, partition=PARTITION, implementation=name)
    assert torch.equal(run("auto"), run(told))


def test_the_log_says_what_ran(good, caplog):
    q, k, v, weights, _ = good.values()
    with caplog.at_level("DEBUG", "ripple_attention"):
        ripple_attention(q, k, v, weights, partition=PARTITION)
    assert caplog.messages[0].startswith("tiled: Problem(")


def test_algorithms_import_nothing_that_chooses_among_them():
    files = list((Path(dispatch.__file__).parent / "ops").rglob("*.py"))
    above = re.compile(r"ripple_attention(\.(functional|dispatch|modules)\b| import )")
    assert files and not [path for path in files if above.search(path.read_text())]


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_opcheck(implementation, dtype, eps):
    operator = getattr(torch.ops.ripple_attention, implementation)
    inputs = make_inputs((3, 4), PARTITION, dtype=dtype, batch=1)
    strided = torch.rand(1, 3, 4, 2, 2, 5).to(dtype).unbind(3)
    for q, k in (inputs[:2], strided):
        tensors = tuple(x.detach().requires_grad_() for x in (q, k, *inputs[2:]))
        torch.library.opcheck(operator, (*tensors, list(PARTITION.radii), eps))


class Watch(TorchDispatchMode):
    """Notes the operators of this package that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("near", ["features", "softmax"])
@pytest.mark.parametrize("implementation", FAST)
def test_eager_calls_pass_operators_by_and_compute_the_same(implementation, near):
    layer = RippleAttention(8, num_heads=2, near=near, implementation=implementation)
    x = torch.randn(2, 9, 12, 8, requires_grad=True)
    leaves = (x, *layer.parameters())

    def run():
        out = layer(x)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    plain, watch = run(), Watch()
    with watch:
        watched = run()
    with torch.profiler.profile() as profiler:
        run()
    profiled = {event.name for event in profiler.events()}
    kind = implementation if near == "features" else f"{implementation}_shared"
    names = {f"ripple_attention::{name}" for name in (kind, f"{implementation}_backward")}
    assert names <= watch.seen and names <= profiled
    for ours, theirs in zip(plain, watched, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(layer(x), plain[0])


@pytest.mark.parametrize("implementation", FAST)
def test_gradients_are_laid_out_as_compiled_code_expects(implementation):
    inputs = make_inputs((5, 4), PARTITION)
    got, expected = gradient_layouts(implementation, inputs, list(PARTITION.radii))
    assert got == expected


@pytest.mark.parametrize("implementation", ALL)
def test_half_precision_is_summed_in_float32(implementation):
    # 16,384 equal tokens: summed in bfloat16, a count stops growing at 256.
    q = k = torch.ones(1, 128, 128, 1, 1, dtype=torch.bfloat16)
    if implementation == "naive":
        q = k = q[:, :16, :64]
    v = torch.ones_like(q)
    weights = torch.full((*q.shape[:4], 4), 0.25)
    out = ripple_attention(q, k, v, weights, partition=PARTITION, implementation=implementation)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("implementation", ALL)
def test_autocast_gives_its_type_and_keeps_float32_sums(implementation):
    inputs = make_inputs((8, 9), PARTITION, dtype=torch.float32, features=16, value_dim=8)
    rounded = (*(x.bfloat16().double() for x in inputs[:3]), inputs[3].double())
    expected = ripple_attention(*rounded, partition=PARTITION, implementation="naive")

    def run(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return ripple_attention(*tensors, partition=PARTITION, implementation=implementation)

    out, grads = gradients(run, inputs)
    assert out.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert relative_error(out, expected.bfloat16()) < 1e-3  # but for the rounding of the output
    with torch.autocast("cpu", torch.bfloat16):
        wide = tuple(x.double() for x in inputs)
        assert ripple_attention(*wide, partition=PARTITION).dtype == torch.float64
        assert linear_attention(*inputs[:3]).dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", FAST)
def test_backward_inside_autocast_keeps_float32_sums(implementation):
    inputs = tuple(
        x.requires_grad_() for x in make_inputs((8, 9), PARTITION, dtype=torch.float32, features=16)
    )
    run = lambda: ripple_attention(*inputs, partition=PARTITION, implementation=implementation)
    expected = torch.autograd.grad(run().square().sum(), inputs)
    out = run()
    loss = out.square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss, inputs)
    for ours, reference in zip(got, expected, strict=True):
        assert torch.equal(ours, reference)


class Layer(torch.nn.Module):
    """Linear → ripple attention on a padded grid, as a model would have it."""

    def __init__(self, partition="chebyshev"):
        super().__init__()
        self.attention = RippleAttention(24, num_heads=2, max_distance=3, partition=partition)

    def forward(self, x, mask):
        return self.attention(F.layer_norm(x, x.shape[-1:]), key_padding_mask=mask)


@pytest.fixture
def layer_inputs():
    torch.manual_seed(0)
    mask = torch.zeros(3, 9, 21, dtype=torch.bool)
    mask[0, 6:], mask[2, :, 15:] = True, True
    return Layer().eval(), torch.randn(3, 9, 21, 24), mask


@pytest.mark.parametrize("implementation", ALL)
def test_compiles_without_a_graph_break(implementation, layer_inputs):
    layer, x, mask = layer_inputs
    layer.attention.implementation = implementation
    layer.train()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parameters = tuple(layer.parameters())
    for batch in (3, 2):
        expected = layer(x[:batch], mask[:batch])
        got = compiled(x[:batch], mask[:batch])
        assert relative_error(got, expected) < 1e-5
        ours = torch.autograd.grad(got.square().sum(), parameters)
        reference = torch.autograd.grad(expected.square().sum(), parameters)
        for grad, expected_grad in zip(ours, reference, strict=True):
            assert relative_error(grad, expected_grad) < 1e-5


@pytest.mark.parametrize("implementation", ALL)
def test_compiled_code_follows_a_change_of_eps(implementation, good):
    q, k, v, weights, _ = good.values()
    q.requires_grad_()

    def run(eps):
        return ripple_attention(
            q, k, v, weights, partition=PARTITION, implementation=implementation, eps=eps
        )

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for eps in (0.0, 0.5, 2.0):  # a constant of the graph at first, then an input
        got, expected = compiled(eps), run(eps)
        assert relative_error(got, expected) < 1e-6
        ours, reference = (torch.autograd.grad(out.sum(), q)[0] for out in (got, expected))
        assert relative_error(ours, reference) < 1e-6


def test_compiles_with_inductor_under_autocast(layer_inputs):
    layer, x, mask = layer_inputs
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(compiled(x, mask), layer(x, mask)) < 2e-2
    assert relative_error(compiled(x, mask), layer(x, mask)) < 1e-5


def dynamic(named):
    """Batch, height and width of x and of the mask, free: with names, or as export finds them."""
    sizes = ("batch", "height", "width")
    free = {i: torch.export.Dim(n) if named else torch.export.Dim.AUTO for i, n in enumerate(sizes)}
    return free, free


SHAPES = [(1, 5, 30), (2, 17, 8), (3, 9, 21)]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_exports_for_every_batch_height_and_width(layer_inputs, eps, named):
    layer, x, mask = layer_inputs
    layer.attention.eps = eps
    program = torch.export.export(layer, (x, mask), dynamic_shapes=dynamic(named))
    assert "ripple_attention::" not in re.sub(r"#.*", "", str(program.graph))  # plain operations
    for shape in SHAPES:
        x, mask = torch.randn(*shape, 24), torch.rand(shape) < 0.2
        assert relative_error(program.module()(x, mask), layer(x, mask)) < 1e-6


@pytest.mark.parametrize(
    ("partition", "named"), [("chebyshev", True), ("chebyshev", False), ("logarithmic", True)]
)
def test_exports_to_onnx_for_every_batch_height_and_width(partition, named, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    layer, path = Layer(partition).eval(), tmp_path / "layer.onnx"
    x, mask = torch.randn(2, 9, 11, 24), torch.zeros(2, 9, 11, dtype=torch.bool)
    torch.onnx.export(
        layer, (x, mask), path, dynamo=True, verbose=False, input_names=["x", "mask"],
        dynamic_shapes=dynamic(named),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in SHAPES:
        x, mask = torch.randn(*shape, 24), torch.rand(shape) < 0.2
        (got,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert relative_error(torch.from_numpy(got), layer(x, mask)) < 1e-5


def test_every_choice_is_exported_as_the_same_operations(layer_inputs):
    layer, x, mask = layer_inputs
    graphs = set()
    for implementation in ("auto", "table", "naive"):
        layer.attention.implementation = implementation
        program = torch.export.export(layer, (x, mask))
        graphs.add(str(program.graph))
        assert relative_error(program.module()(x, mask), layer(x, mask)) < 1e-5
    assert len(graphs) == 1


def test_auto_compiles_once_for_many_grids():
    torch._dynamo.reset()
    layer = RippleAttention(8, num_heads=1)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for side in range(20, 32):
        x = torch.randn(1, side, side + 3, 8)
        assert relative_error(compiled(x), layer(x)) < 1e-5


def test_forward_mode_takes_naive_and_is_refused_elsewhere(good):
    q, k, v, weights, _ = good.values()

    def tangent(implementation):
        def run(x):
            return ripple_attention(
                x, k, v, weights, partition=PARTITION, implementation=implementation
            )

        return torch.func.jvp(run, (q,), (torch.ones_like(q),))[1]

    assert torch.equal(tangent("auto"), tangent("naive"))
    assert tangent("auto").norm() > 0
    for implementation in FAST:
        with pytest.raises(ValueError, match="no forward-mode derivatives.*'naive' can run"):
            tangent(implementation)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "per sample", "of a batch"])
def test_functional_gradients_take_naive_and_are_refused_elsewhere(transform):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 8)

    def gradient(implementation):
        layer = RippleAttention(8, num_heads=2, implementation=implementation).double()
        layer.load_state_dict(weights)
        parameters = dict(layer.named_parameters())

        def loss(parameters, image):
            return functional_call(layer, parameters, (image[None],)).square().sum()

        def loss_of_all(parameters, images):
            return torch.func.vmap(loss, (None, 0))(parameters, images).sum()

        transforms = {
            "grad": lambda: torch.func.grad(loss)(parameters, x[0].double()),
            "jacrev": lambda: torch.func.jacrev(loss)(parameters, x[0].double()),
            "per sample": lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(
                parameters, x.double()
            ),
            "of a batch": lambda: torch.func.grad(loss_of_all)(parameters, x.double()),
        }
        return transforms[transform]()

    weights = RippleAttention(8, num_heads=2).state_dict()
    plain = RippleAttention(8, num_heads=2, implementation="tiled").double()
    plain.load_state_dict(weights)
    plain(
        x[:1].double() if transform in ("grad", "jacrev") else x.double()
    ).square().sum().backward()
    got = gradient("auto")
    for name, parameter in plain.named_parameters():
        ours = got[name].sum(0) if transform == "per sample" else got[name]
        assert relative_error(ours, parameter.grad) < 1e-10
    for implementation in FAST:
        with pytest.raises(ValueError, match="none of torch.func.*'naive' can run"):
            gradient(implementation)


def test_a_partition_made_by_hand_runs(good):
    q, k, v, _, _ = good.values()
    weights = torch.rand(2, 4, 5, 2, 3)
    out = ripple_attention(q, k, v, weights, partition=Partition((1, 3)))
    assert out.shape == v.shape
