"""Kernels of shared sums: interpreted on a CPU, and compiled for GPUs not present."""

from collections import Counter

import pytest
import torch

from inputs import gradients, make_inputs, make_mask
from kernels import (
    HERE,
    assert_hardly_spills,
    assert_within_twice,
    compile_only,
    disassemble,
    interpreted,
    needs_triton,
    run,
    unwritten_registers,
)
from ripple_attention import Partition, dispatch, foveal, logarithmic
from ripple_attention.dispatch import Problem

pytestmark = needs_triton
KERNELS = {"state_kernel", "forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}

CASES = [  # grid, partition, M, E, mask, eps, heads
    ((1, 1), foveal(1), 4, 4, "none", 0.0, 1),
    ((1, 30), foveal(2, 8, 1), 16, 5, "random", 0.5, 2),
    ((9, 20), foveal(4), 8, 16, "none", 0.0, 2),
    ((25, 17), foveal(3, 8, 2), 5, 3, "rows", 0.5, 1),
    ((20, 33), foveal(1, 16, 1), 16, 8, "image", 0.0, 1),
    ((9, 18), Partition((1, 6), 8, (2,)), 48, 32, "none", 0.0, 1),
    # Wide boxes: wider than the grid is high; unaligned; one alone; two with strips of no lines.
    ((5, 26), Partition((0, 8)), 16, 5, "random", 0.5, 2),
    ((25, 11), Partition((2, 11)), 5, 3, "rows", 0.0, 1),
    ((20, 40), Partition((15,)), 8, 16, "none", 0.0, 1),
    ((10, 20), Partition((1, 3, 8)), 3, 4, "image", 0.0, 1),
    ((3, 40), Partition((0, 9, 30)), 48, 32, "none", 0.0, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16: on GPUs
@pytest.mark.parametrize("case", range(len(CASES)))
@interpreted
def test_shared_sums_are_as_precise_as_tile_sums(case, dtype):
    grid, partition, M, E, mask_kind, eps, heads = CASES[case]
    inputs = make_inputs(
        grid, partition, batch=2 if mask_kind == "image" else 1, features=M, value_dim=E,
        dtype=dtype, heads=heads,
    )  # fmt: skip
    mask = make_mask(mask_kind, grid, len(inputs[0]))
    assert_within_twice("tile_sums", partition, inputs, mask, eps)


@pytest.mark.parametrize(
    "partition", [foveal(2, 8, 1), Partition((0, 1, 9))], ids=["coarse", "boxes"]
)
@interpreted
def test_queries_that_see_dead_keys_alone_give_zeros(partition):
    q, k, v, weights = make_inputs((20, 26), partition, batch=1, heads=1, dtype=torch.float32)
    k[:, partition.groups((3, 4), (20, 26)) == 2] = 0  # not padded: features that are zero
    weights.zero_()[..., 2] = 1
    leaves = tuple(x.requires_grad_() for x in (q, k, v, weights))
    blind = run("tile_sums_triton", partition)(*leaves)[:, 3, 4]
    assert (blind == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(blind.sum(), leaves))


@pytest.mark.parametrize(
    "partition", [foveal(2, 8, 1), Partition((0, 1, 9))], ids=["coarse", "boxes"]
)
@interpreted
def test_strided_views_give_the_same_result(partition):
    q, k, v = torch.rand(1, 9, 20, 3, 2, 6).unbind(3)
    weights = torch.rand(1, 2, 9, 20, partition.num_groups).permute(0, 2, 3, 1, 4)
    inputs = (q, k, v, weights)
    strided = gradients(run("tile_sums_triton", partition), inputs)
    dense = gradients(run("tile_sums_triton", partition), tuple(x.contiguous() for x in inputs))
    assert torch.equal(strided[0], dense[0])
    assert all(map(torch.equal, strided[1], dense[1]))


def test_odd_tiles_and_wide_states_in_little_shared_memory_are_refused():
    def reason(partition, width=32):
        problem = Problem(
            (64, 64), width, 32, partition.radii, torch.bfloat16, "cuda", None, shared=99,
            tile_radii=partition.tile_radii, tile=partition.tile,
        )  # fmt: skip
        return next(b for b in dispatch.BACKENDS if b.name == "tile_sums_triton").supports(problem)

    assert "multiple of 8 tokens; got 4" in reason(foveal(4, 4))
    assert "more than 64 features or value channels; got 128" in reason(foveal(), 128)
    assert reason(foveal()) is reason(foveal(4, 16)) is reason(logarithmic(31)) is None


def compile_all(partition, dtype, features, value_dim, capability, monkeypatch):
    """The kernels of both passes by name, as often as they are launched."""
    from ripple_attention.ops.kernels import strips, tile_sums

    compiled = compile_only(monkeypatch, capability, KERNELS, tile_sums, strips)
    q, k = torch.zeros(1, 16, 72, 2, 2, features, dtype=dtype).unbind(3)
    v, weights = (torch.zeros(1, 16, 72, 2, width) for width in (value_dim, partition.num_groups))
    v = v.to(dtype)
    out = tile_sums.tile_sums_triton_forward(q, k, v, weights, partition.bounds, 0.0)
    tile_sums.tile_sums_triton_backward(out[0], q, k, v, weights, *out, partition.bounds)
    return compiled


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("partition", [foveal(), logarithmic(15)], ids=["coarse", "boxes"])
def test_odd_widths_are_no_products_of_warp_groups(partition, monkeypatch):
    for name, binary in compile_all(partition, torch.bfloat16, 24, 50, 90, monkeypatch):
        code = disassemble(binary)
        assert "gdesc" not in code and not unwritten_registers(code), name


@pytest.mark.skipif(HERE, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("partition", [foveal(), logarithmic(15)], ids=["coarse", "boxes"])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 64), (torch.float16, 64), (torch.bfloat16, 128)],
)
def test_every_kernel_compiles_and_hardly_spills(partition, dtype, width, capability, monkeypatch):
    compiled = compile_all(partition, dtype, width, width, capability, monkeypatch)
    # Beside three launches of states: one of each kernel, for boxes two more of strips.
    launches = dict.fromkeys(KERNELS, 1 if partition.tile else 3)
    assert Counter(name for name, _ in compiled) == launches | {"state_kernel": 3}
    for name, binary in compiled:
        assert binary.metadata.shared <= (99 if width <= 64 else 160) * 1024, name
        assert_hardly_spills(name, binary, 256 if width <= 64 or partition.tile else 512)
        assert "mma" in binary.asm["ptx"]
        if capability == 90:
            assert not unwritten_registers(disassemble(binary)), name
