"""Gluon kernels on a CPU, as plain NumPy: what they compute, not how it is laid out.

Triton's interpreter does not know Gluon. Here the same source runs with other meanings of its
names: tensors are arrays whatever their layout, pointers are a memory and offsets, shared memory
begins as NaN. A program runs once for each of its warps, which keeps the rows that are its own.
So a wrong slot or a wrong order shows, but no missing barrier, no layout and no width of integers.
"""

import types

import numpy as np
import torch

ROWS = 16  # of a warp, in all that is stored


class Array(np.ndarray):
    """An array that knows the words of Gluon's tensors, and like them never changes."""

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def permute(self, order):
        return self.transpose(order)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return array(np.ascontiguousarray(self).view(dtype))
        if dtype == "bfloat16":
            rounded = torch.from_numpy(np.asarray(self, np.float32)).bfloat16().float()
            return array(rounded.numpy())
        return array(np.asarray(self, dtype))


def array(x):
    return np.asarray(x).view(Array)


class Memory:
    """The storage of a tensor: numbers to read, and the tensor to write."""

    def __init__(self, tensor):
        self.tensor = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        self.numbers = self.tensor.float().numpy()
        self.type = str(tensor.dtype).removeprefix("torch.")


class Pointer:
    def __init__(self, memory, offset):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.type)

    def __add__(self, more):
        return Pointer(self.memory, array(self.offset + more))

    def __getitem__(self, at):
        return Pointer(self.memory, self.offset[at])


class Shared:
    def __init__(self, numbers):
        self.numbers = numbers

    def index(self, at):
        assert 0 <= at < len(self.numbers)
        return Shared(self.numbers[int(at)])

    def permute(self, order):
        return Shared(self.numbers.transpose(order))

    def slice(self, start, length):
        return Shared(self.numbers[start : start + length])

    def _reinterpret(self, _, shape, __):
        return Shared(self.numbers.reshape(shape))

    def load(self, _):
        return array(self.numbers.copy())

    def store(self, x):
        self.numbers[...] = x


def _load(pointer, mask=True, other=0.0):
    mask = np.broadcast_to(mask, pointer.offset.shape)
    found = pointer.memory.numbers[np.where(mask, pointer.offset, 0)]
    return array(np.where(mask, found, np.float32(other)))


def _inline_asm(warp):
    """Which warp it is; a shuffle in the fours of threads that have a column; or what changes
    nothing, but where it lies."""

    def run(assembly, _, given, **__):
        if not given:
            return warp
        if not assembly.startswith("shfl"):
            return given[0]
        x, lane = given
        columns = np.arange(x.shape[-1])
        assert (lane % 4 == columns // 2 % 4).all()
        return array(x[0][lane // 4, columns])

    return run


def _copy(shared, pointer, mask=True):
    shared.numbers[...] = _load(pointer, mask)


class _Kernel:
    """A kernel's source with the names of one program and one warp."""

    def __init__(self, modules, kernel, ids, warp):
        self.ids, self.warp = ids, warp
        gluon = types.SimpleNamespace(
            float32=np.float32,
            int32=np.int32,
            int64=np.int64,
            bfloat16="bfloat16",
            arange=lambda start, end, _: array(np.arange(start, end)),
            full=lambda shape, number, _, __: array(np.full(shape, number, np.float32)),
            zeros_like=lambda x: array(np.zeros_like(x)),
            zeros=lambda shape, dtype, _: array(np.zeros(shape, dtype)),
            where=lambda c, x, y: array(np.where(c, x, y).astype(np.float32)),
            abs=lambda x: array(np.abs(x)),
            minimum=lambda x, y: array(np.minimum(x, y)),
            maximum=lambda x, y: array(np.maximum(x, y)),
            sum=lambda x, axis: array(np.sum(x, axis)),
            convert_layout=lambda x, *_, **__: x,
            static_range=range,
            load=_load,
            store=self.store,
            program_id=lambda axis: array(ids[axis]),
            inline_asm_elementwise=_inline_asm(warp),
            allocate_shared_memory=lambda _, shape, __: Shared(np.full(shape, np.nan, np.float32)),
            NVMMADistributedLayout=lambda *_: None,
            DotOperandLayout=lambda *_: None,
            SliceLayout=lambda *_: None,
            BlockedLayout=lambda *_: None,
            DistributedLinearLayout=lambda *_: None,
            SwizzledSharedLayout=lambda *_: None,
        )
        names = {
            "gl": gluon,
            "async_copy": types.SimpleNamespace(
                async_copy_global_to_shared=_copy,
                commit_group=lambda: None,
                wait_group=lambda _: None,
            ),
            "mma_v2": lambda x, y, total: array(x @ y + total),
            "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
            "barrier": lambda: None,
            "__builtins__": __builtins__,
        }
        for name, value in (pair for module in modules for pair in vars(module).items()):
            if hasattr(value, "fn"):  # the functions that kernels are made of
                names[name] = types.FunctionType(value.fn.__code__, names)
            elif hasattr(value, "value"):  # constants
                names[name] = value.value
        self.run = names[kernel.fn.__name__]

    def store(self, pointer, x, mask=True):
        mask = np.broadcast_to(mask, pointer.offset.shape).copy()
        mask[: ROWS * self.warp] = mask[ROWS * (self.warp + 1) :] = False
        at = torch.from_numpy(np.asarray(pointer.offset[mask], np.int64))
        numbers = torch.from_numpy(np.broadcast_to(x, mask.shape)[mask].astype(np.float32))
        pointer.memory.tensor[at] = numbers.to(pointer.memory.tensor.dtype)


def launcher(*modules):
    """A stand-in for `launch` in a module of Gluon kernels; others are those it has parts from."""

    def launch(kernel, grid, *arguments, num_warps, **_):
        def ready(argument):
            if isinstance(argument, torch.Tensor):
                return Pointer(Memory(argument), array(argument.storage_offset()))
            return argument

        arguments = [ready(x) for x in arguments]
        for ids in np.ndindex(*grid):
            for warp in range(num_warps):
                _Kernel(modules, kernel, ids, warp).run(0, *arguments)

    return launch
