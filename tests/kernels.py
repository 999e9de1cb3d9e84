"""How kernels are tested without a GPU: interpreted on a CPU, and compiled for GPUs not present.

Triton's interpreter has to be asked for before triton is imported, and would then serve everything
in the process. So tests marked `interpreted` run in a worker process of their own, one for all of
them. With `TRITON_INTERPRET=1 pytest tests/library/test_triton.py` they run in place, for a
debugger.
"""

import importlib.util
import os
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, wraps
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch

from inputs import gradients, relative_error
from ripple_attention import ripple_attention

HERE = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton installed"
)


@cache
def worker():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        pool.submit(repair_interpreter).result()
    finally:
        del os.environ["TRITON_INTERPRET"]
    return pool


def interpreted(test):
    """Runs a test in the worker, where the kernels are interpreted."""

    @wraps(test)
    def in_worker(**arguments):
        if os.environ.get("TRITON_INTERPRET") == "1":
            from ripple_attention.ops import tiling

            before = tiling.SINGLE_WINDOW_TOKENS  # which tests change
            try:
                test(**arguments)
            finally:
                tiling.SINGLE_WINDOW_TOKENS = before
        else:
            worker().submit(in_worker, **arguments).result()

    return in_worker


def repair_interpreter():
    """Makes bfloat16 right (the interpreter multiplies its bits as integers), products independent
    of where a row stands, and calls faster."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    plain_cast = builder.cast_impl

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast(self, x, to):
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
            return handle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return widen(x) if to.scalar == tl.float32 else plain_cast(self, x, to)

    def cast_where_needed(self, x, to):
        bfloat = tl.bfloat16 in (x.dtype.scalar, to.scalar)
        return cast(self, x, to) if bfloat else plain_cast(self, x, to)

    def dot(self, a, b, total, *_):
        # Row by row: on some CPUs NumPy rounds a row otherwise where it stands elsewhere.
        left, right = widen(a).data[..., None, :], widen(b).data[..., None, :, :]
        product = np.matmul(left, right, dtype=total.data.dtype)[..., 0, :]
        return handle(product + total.data, total.dtype.scalar)

    builder.cast_impl = cast_where_needed
    builder.create_dot = dot
    # Half of the time would go into checks for overflow, whose result is not looked at.
    unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = unchecked
    # Our functions are called from kernels, for which the language has been patched.
    function = interpreter.InterpretedFunction
    plain_call = function.__call__

    def call(self, *arguments, **options):
        if self.fn.__module__.startswith("ripple_attention"):
            return self.rewrite()(*arguments, **options)
        return plain_call(self, *arguments, **options)

    function.__call__ = call


class AbsentGPU:
    """As much of Triton's driver as its compiler asks for."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # a key of Triton's cache

    def get_current_stream(self, _):
        return 0


class CompileOnly:
    """A kernel whose launches compile it."""

    def __init__(self, kernel, compiled):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            binary = self.kernel.warmup(*arguments, grid=grid, **options)
            self.compiled.append((self.kernel.__name__, binary))

        return launch


def compile_only(monkeypatch, capability, names, *modules):
    """Has kernels of these names be compiled, in place of being launched, for an absent GPU.

    Returns:
        A list that gets each kernel's name and binary when it is launched.
    """
    from triton.runtime.driver import driver

    compiled = []
    monkeypatch.setattr(driver, "_active", AbsentGPU(capability))
    for module in modules:
        for name in set(names) & set(vars(module)):
            kernel = getattr(module, name)
            kernel = kernel.kernel if isinstance(kernel, CompileOnly) else kernel
            monkeypatch.setattr(module, name, CompileOnly(kernel, compiled))
    return compiled


def stack_bytes(binary):
    """What a compiled kernel keeps in memory because it has too few registers, for a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)[1])


def assert_hardly_spills(name, binary, most):
    """A kernel keeps at most so many bytes of a thread in memory; newer compilers, more."""
    import triton

    spilled = stack_bytes(binary)
    if spilled > most and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        pytest.xfail(f"Triton {triton.__version__} spills {spilled} bytes of {name}, not {most}")
    assert spilled <= most, name


def unwritten_registers(machine_code):
    """Instructions that read a uniform register which none before them has written.

    Among these registers are the descriptors of operands in shared memory, `gdesc`, four a product:
    two of each operand, of which the first two are unused where it is in registers itself.
    """
    written, found = set(), []
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;", machine_code):
        name, _, rest = re.sub(r"^@!?\w+ ", "", instruction).partition(" ")
        operands, target = re.sub(r"(!?UP[T\d], )*", "", rest, count=1), set()
        if re.match(r"U|R2UR|S2UR|REDUX|VOTEU", name) and operands.startswith("UR"):
            first, _, operands = operands.partition(", ")
            target = {first.removeprefix("UR")}
            if re.search(r"\.64|WIDE", name):
                target.add(str(int(*target) + 1))
        read = set(re.findall(r"\bUR(\d+)", operands))
        for first in re.findall(r"gdesc\[UR(\d+)\]", operands):
            in_registers = re.match(r"R\d+, R\d+, gdesc", operands)
            read -= {first}
            read |= {str(int(first) + i) for i in range(2 if in_registers else 0, 4)}
        if read - written:
            found.append(instruction)
        written |= target
    return found


def disassemble(binary):
    """The machine code of a compiled kernel, as text."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True).stdout


if HERE:
    repair_interpreter()


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
    from ripple_attention.ops import tiling

    tiling.SINGLE_WINDOW_TOKENS = largest_whole
