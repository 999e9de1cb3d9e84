"""Which back end runs: the one that supports a problem at the lowest expected cost.

The choice depends on a `Problem` alone. Each `Backend` says whether it supports a problem, and if
not, why. All limits on width, reach, type and grid live in these functions.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ripple_attention.checks import shorten
from ripple_attention.ops.tile_sums import TILE
from ripple_attention.ops.tiled import halo_size

LOG = logging.getLogger("ripple_attention")
if os.environ.get("RIPPLE_LOG"):
    LOG.addHandler(logging.StreamHandler())
    LOG.setLevel(os.environ["RIPPLE_LOG"].upper())

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Each tile walks over its window. Beyond this reach, tables and PyTorch's products are faster.
MAX_REACH = 16
MAX_WIDTH = 128  # of features and values, which a program holds in registers
# Of fused maps with sines. Shared memory holds both their matrices, in bfloat16 for bfloat16 inputs
# and in four bytes a number for float16 and float32.
MAX_SINES_WIDTH = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
MAX_FUSED_GROUPS = 64

# Kilobytes of shared memory a block: what the widest feature kernels need, as an A100 or H100 has.
# GeForce and RTX cards have 99.
LARGE_SHARED = 160

# A table's multiply-adds wait for memory, those of a tile run in cached matrix products: about the
# ratio of their costs in `ripple bench op` (64×64 tokens, float32, both passes, 2 CPU cores).
TABLE_PENALTY = 14

# The states of a wide box by shared sums: making, adding up and reading them, in M·E multiply-adds
# for each query.
WIDE_BOX = 12

# In half precision and up to so many tokens, `naive_triton` is the fastest for groups too wide for
# `tiled_triton`, in little memory (`ripple bench op`, 16,384 tokens, both passes, one H200).
PAIRS_TOKENS = 16384

# Whether "auto" takes kernels for the window of near softmax. The interpreter proves them, and they
# compile for GPUs, but nobody has timed them on one: until then they run only by name.
NEAR_KERNELS = False

# Nobody has run `tile_sums_triton` on a GPU yet, so "auto" does not take it.
TILE_SUMS_KERNELS_ARE_MEASURED = False

# The cost of what "auto" takes only where nothing else can run.
NEVER = 1e30


class Problem(NamedTuple):
    """All that the choice of a back end depends on.

    `machine` says why kernels cannot run where the tensors are, or is None. `features` and
    `weights` name the kind of feature map and of spatial weights that a kernel would compute for a
    layer: "" if kernels know none like it, None if the caller has computed them, as for operators.
    """

    grid: tuple[int, int]
    num_features: int
    value_dim: int
    radii: tuple[int, ...] | None  # None: linear attention
    dtype: torch.dtype
    device: str
    machine: str | None
    features: str | None = None
    weights: str | None = None
    head_dim: int = 0  # of queries before the map
    transformed: bool = False  # forward-mode derivatives, or those of torch.func
    shared: int = LARGE_SHARED  # kilobytes of shared memory that a block may have
    near: int | None = None  # the radius within which tokens weigh by softmax, outside of `radii`
    prefix: int = 0  # tokens without a place on the grid
    tile_radii: tuple[int, ...] = ()  # of coarse rings
    tile: int = 0


@dataclass(frozen=True)
class Backend:
    """One way to compute ripple attention.

    Args:
        name: What `implementation=` calls it.
        summary: What it does, in a few words.
        supports: A problem → None, or why this back end cannot solve it.
        cost: A problem → multiply-adds for a query and head, as PyTorch does them in cached matrix
            products; infinite where "auto" never takes it.
    """

    name: str
    summary: str
    supports: Callable[[Problem], str | None]
    cost: Callable[[Problem], float]


def kernels_can_run(kind: str, index: int | None = None) -> str | None:
    """Why Triton kernels cannot run on a device of some kind and index, or None."""
    return _machine(kind, index, os.environ.get("TRITON_INTERPRET") == "1")


# `torch.compiler.assume_constant_result` does this, but imports torch._dynamo, and so triton.
kernels_can_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _machine(kind: str, index: int | None, interpreted: bool) -> str | None:
    if find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    if interpreted and kind == "cpu":
        return None
    if kind != "cuda":
        return f"needs tensors on an NVIDIA GPU (or TRITON_INTERPRET=1); got {kind!r} tensors"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU; got one by AMD"
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 or newer; got {capability}"
    return None


def shared_memory(kind: str, index: int | None = None) -> int:
    """Kilobytes of shared memory that a block of a kernel may have on a device."""
    return _shared(index) if kind == "cuda" else LARGE_SHARED


shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _shared(index: int | None) -> int:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", LARGE_SHARED * 1024) // 1024


def _kernels(problem: Problem) -> str | None:
    """What no kernel can do."""
    if problem.machine:
        return problem.machine
    if problem.dtype not in KERNEL_DTYPES:
        return f"needs float32, bfloat16 or float16 inputs; got {problem.dtype}"
    width = max(problem.num_features, problem.value_dim)
    if width > MAX_WIDTH:
        return f"needs at most {MAX_WIDTH} features and value channels a head; got {width}"
    if problem.near is not None and problem.head_dim > MAX_WIDTH:
        return f"needs queries of at most {MAX_WIDTH} channels; got {problem.head_dim}"
    return _plain(problem)


def _boxes(supports: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    """As `supports`, for an algorithm that knows boxes around tokens only."""

    def check(problem: Problem) -> str | None:
        if problem.tile_radii:
            return f"has no coarse rings; got some of {problem.tile_radii} tiles"
        return supports(problem)

    return check


def _plain(problem: Problem) -> str | None:
    if problem.transformed:
        return "has no forward-mode derivatives and none of torch.func"
    return None


def _tiles(problem: Problem) -> str | None:
    if problem.radii and problem.radii[-1] > MAX_REACH:
        return f"needs a last box of radius ≤ {MAX_REACH}; got {problem.radii[-1]}"
    return _kernels(problem)


def features_fuse(problem: Problem) -> str | None:
    """Why no kernel makes the features, or None."""
    if problem.features is None:
        return "includes a layer's feature map; the operators start after it"
    if problem.machine:
        return problem.machine
    if not problem.features:
        return "needs a known feature map of this package, unchanged, in such a layer; fuse=True"
    limit = MAX_SINES_WIDTH.get(problem.dtype, 0) if problem.features == "sines" else MAX_WIDTH
    width = max(problem.head_dim, problem.num_features)
    if width > limit and problem.dtype in KERNEL_DTYPES:
        return f"makes sines of at most {limit} channels in {problem.dtype}; got {width}"
    limit = _small_features(problem)
    if problem.shared < LARGE_SHARED and width > limit:
        return (
            f"needs {LARGE_SHARED} kB of shared memory for features of more than {limit} channels "
            f"in {problem.dtype}; this GPU has {problem.shared}"
        )
    return _kernels(problem)


def _small_features(problem: Problem) -> int:
    """Up to which width features are made in the shared memory that every GPU has."""
    if problem.features == "sines":
        return 32 if problem.dtype == torch.float16 else 64
    return 64 if problem.dtype == torch.float16 else MAX_WIDTH


def weights_fuse(problem: Problem) -> str | None:
    """Why no kernel makes the spatial weights, or None."""
    if problem.machine:
        return problem.machine
    if not problem.weights:
        return "needs known spatial weights of this package, unchanged, in such a layer; fuse=True"
    if problem.radii is not None and len(problem.radii) >= MAX_FUSED_GROUPS:
        return f"makes weights of at most {MAX_FUSED_GROUPS} groups; got {len(problem.radii) + 1}"
    return _kernels(problem)


def _features_alone(problem: Problem) -> str | None:
    if problem.near is not None or problem.prefix:
        return 'computes near="features" without prefix tokens'
    return None


def _fused(problem: Problem) -> str | None:
    reason = _features_alone(problem) or features_fuse(problem)
    if not reason and problem.weights:
        reason = weights_fuse(problem)
    return reason or _tiles(problem)


def _shared_sums(problem: Problem) -> str | None:
    if problem.tile % 8:
        return f"needs tiles of a multiple of 8 tokens; got {problem.tile}"
    if problem.tile and problem.radii and problem.radii[-1] > MAX_REACH:
        return f"needs coarse rings from a radius ≤ {MAX_REACH} on; got {problem.radii[-1]}"
    width = max(problem.num_features, problem.value_dim)
    if width > 64 and problem.shared < LARGE_SHARED:
        return (
            f"needs {LARGE_SHARED} kB of shared memory for more than 64 features or value "
            f"channels; got {width}, and a GPU of {problem.shared}"
        )
    return _kernels(problem)


def _shared_sums_cost(problem: Problem) -> float:
    measured = TILE_SUMS_KERNELS_ARE_MEASURED and problem.device == "cuda"
    return 1.0 if measured else math.inf


def _on_gpu(cost: float) -> Callable[[Problem], float]:
    return lambda problem: cost if problem.device == "cuda" else math.inf


def _pairs_cost(problem: Problem) -> float:
    few = problem.dtype.itemsize == 2 and math.prod(problem.grid) <= PAIRS_TOKENS
    return 2.0 if few and problem.device == "cuda" else math.inf


def _tiled_cost(problem: Problem) -> float:
    M, E = problem.num_features, problem.value_dim
    return halo_size(*problem.grid, _radii(problem)[-1]) * (M + E) + M * E


def _table_cost(problem: Problem) -> float:
    corners = 4 * len(_radii(problem))
    return corners * problem.num_features * problem.value_dim * TABLE_PENALTY


def _boxes_cost(problem: Problem) -> float:
    return 0.99 * _table_cost(problem) if problem.device == "cuda" else math.inf


def _tile_sums_cost(problem: Problem) -> float:
    if problem.device == "cuda" and not problem.tile_radii:
        return math.inf  # many small products: not yet measured there
    M, E, radii = problem.num_features, problem.value_dim, _radii(problem)
    near = max([0, *(radius for radius in radii if radius < TILE)])
    cost = halo_size(*problem.grid, near) * (M + E) + M * E
    if problem.tile_radii:
        return cost + 2 * len(problem.tile_radii) * M * E
    for radius in radii:
        if radius >= TILE:
            corners = (2 * (TILE - 1 + (radius + 1) % TILE)) ** 2
            cost += WIDE_BOX * M * E + corners * (M + E)
    return cost


def _radii(problem: Problem) -> tuple[int, ...]:
    return problem.radii or (0,)


BACKENDS = (
    Backend("fused", "all between a layer's projections by kernels", _boxes(_fused), _on_gpu(0.0)),
    Backend("tiled_triton", "a window and one far sum, by kernels", _boxes(_tiles), _on_gpu(1.0)),
    Backend("naive_triton", "all pairs, by kernels", _boxes(_kernels), _pairs_cost),
    Backend("tiled", "a window and one far sum", _boxes(_plain), _tiled_cost),
    Backend("tile_sums", "a window and sums that tiles share", _plain, _tile_sums_cost),
    Backend(
        "tile_sums_triton",
        "a window and sums that tiles share, by kernels",
        _shared_sums,
        _shared_sums_cost,
    ),
    Backend("table_triton", "summed-area tables, by kernels", _boxes(_kernels), _boxes_cost),
    Backend("table", "summed-area tables", _boxes(_plain), _table_cost),
    Backend("naive", "all pairs: the definition", lambda _: None, lambda _: NEVER),
)
IMPLEMENTATIONS = (
    "naive",
    "table",
    "tiled",
    "tile_sums",
    "tiled_triton",
    "tile_sums_triton",
    "table_triton",
    "naive_triton",
)


def check_implementation(implementation: str) -> str:
    """The name itself, if it is one."""
    known = ("auto", *IMPLEMENTATIONS)
    if not isinstance(implementation, str) or implementation not in known:
        names = ", ".join(map(repr, known))
        came = shorten(implementation)
        raise ValueError(f"implementation must be one of {names}; got implementation={came}")
    return implementation


def candidates(implementation: str) -> tuple[str, ...]:
    """The back ends that a choice allows: fused kernels are the same tiles."""
    check_implementation(implementation)
    if implementation == "auto":
        return tuple(backend.name for backend in BACKENDS)
    return ("fused", "tiled_triton") if implementation == "tiled_triton" else (implementation,)


def choose(problem: Problem, implementation: str = "auto") -> str:
    """The name of the back end that runs; refuses an explicit choice that cannot.

    "auto" takes the cheapest that can run. On a GPU those are kernels: tiles where they reach,
    pairs or tables for wider partitions. Elsewhere it compares multiply-adds for a query and head:

    - tiles: M + E for every key of their halo, and M·E for the far part;
    - sums that tiles share: `WIDE_BOX` times M·E, and the pairs in its corners, for every wide box;
    - a table: 4·(G−1) corners of M·E numbers, each of which counts `TABLE_PENALTY`.
    """
    if torch.compiler.is_compiling():
        return _choose(problem, implementation)
    name = _choose_once(problem, implementation)
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s: %s", name, problem)
    return name


def _choose(problem: Problem, implementation: str) -> str:
    allowed = candidates(implementation)
    able = [b for b in BACKENDS if b.name in allowed and b.supports(problem) is None]
    if implementation == "auto":
        cheapest, least = able[0], able[0].cost(problem)
        for backend in able[1:]:  # `min` takes no symbols of a compiled graph
            cost = backend.cost(problem)
            if cost < least:
                cheapest, least = backend, cost
        return cheapest.name
    if not able:
        last = next(b for b in BACKENDS if b.name == allowed[-1])
        others = ["auto", *(b.name for b in BACKENDS[1:] if b.supports(problem) is None)]
        raise ValueError(
            f"implementation={implementation!r} {last.supports(problem)}. "
            f"{', '.join(map(repr, others[:-1]))} or {others[-1]!r} can run."
        )
    return able[0].name


_choose_once = lru_cache(4096)(_choose)


def choose_window(problem: Problem, backend: str, implementation: str = "auto") -> str:
    """What computes the window of near softmax: "pairs", "tiles" or "kernels".

    Args:
        problem: What is to be computed.
        backend: What `choose` has taken for the features.
        implementation: What was asked for.
    """
    if backend == "naive":
        return "pairs"
    measured = NEAR_KERNELS and implementation == "auto" and problem.device == "cuda"
    asked = implementation.endswith("_triton") or measured
    return "kernels" if asked and _kernels(problem) is None else "tiles"


def explain(problem: Problem, implementation: str = "auto") -> str:
    """Prints every back end, which one runs, and why others do not; returns the one that runs."""
    allowed = candidates(implementation)
    runs = choose(problem, implementation)
    H, W = problem.grid
    print(
        f"{H}×{W} tokens, {problem.num_features} features, {problem.value_dim} value channels, "
        f"radii {problem.radii}, {problem.dtype} on {problem.device}, {implementation=}"
    )
    for backend in BACKENDS:
        reason = backend.supports(problem)
        if backend.name == runs:
            verdict = f"runs: {backend.summary}"
        elif reason:
            verdict = f"cannot: {reason}"
        elif backend.name not in allowed:
            verdict = "could run, and was not asked for"
        else:
            verdict = f"could run: {backend.summary}; costs more"
        print(f"  {backend.name:16} {verdict}")
    if problem.near is not None:
        window = choose_window(problem, runs, implementation)
        print(f"  within {problem.near} of a query: softmax by {window}, not by features")
    return runs
