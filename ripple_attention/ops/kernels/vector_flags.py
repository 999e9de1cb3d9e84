"""Keeps LLVM from mixing up the lanes of integer vectors in the kernels it compiles.

Its optimiser joins index arithmetic of a thread into vectors, such as `shl nuw nsw <2 x i32> %x,
<i32 28, i32 1>`, of which a lane may be meant for nobody. In that lane the promise "does not
overflow" (nuw, nsw) is broken, which is allowed as long as nobody looks. But for NVIDIA GPUs two
lanes travel as one number of 64 bits, the shift becomes a product of 64 bits that relies on the
promise, and the bits that overflow end up in the other lane. Seen with Triton 3.6 on an H200: boxes
of radius 8 with 64 features and 32 value channels took in tokens too far away.

Without promises nothing is mixed up, and a promise less is never wrong: they are taken from the
arithmetic of integer vectors before it becomes assembly.
This module imports triton.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import triton
from triton import knobs

ARITHMETIC = "shl|add|sub|mul|trunc|lshr|ashr|udiv|sdiv|or|zext|uitofp"
PROMISES = re.compile(rf"= ({ARITHMETIC}) (?:(?:nuw|nsw|exact|disjoint|nneg) )+<")
OF_COMPARISONS = re.compile(r"= icmp samesign (\w+) <")
# Since 3.7 Triton asks the hook for a part of the key of its cache on disk. Before, what was once
# compiled with promises would be found there.
APART = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
_ONE_AT_A_TIME = RLock()  # the hook is one for all threads


def strip_promises(llvm_ir: str) -> str:
    """The same without nuw, nsw, exact, disjoint, nneg and samesign of integer vectors."""
    return OF_COMPARISONS.sub(r"= icmp \1 <", PROMISES.sub(r"= \1 <", llvm_ir))


@contextmanager
def stripped_promises() -> Iterator[None]:
    """What is compiled within is compiled without such promises."""
    with _ONE_AT_A_TIME, knobs.cache.scope():
        outer = knobs.runtime.add_stages_inspection_hook

        def hook(*arguments: Any) -> Any:
            if not arguments:  # asked for what tells its kernels from others, in Triton's cache
                before = outer() if outer is not None else ("", "")
                return tuple(f"{x} without promises of vectors" for x in before)
            if outer is not None:
                outer(*arguments)
            stages: dict[str, Callable[..., Any]] = arguments[1]
            to_llvm = stages["llir"]
            stages["llir"] = lambda source, metadata: strip_promises(to_llvm(source, metadata))
            return None

        if APART:
            knobs.cache.dir = os.path.join(knobs.cache.dir, "without-promises-of-vectors")
        knobs.runtime.add_stages_inspection_hook = hook
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = outer
