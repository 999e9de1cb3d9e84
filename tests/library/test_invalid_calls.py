"""Every invalid call of a public function is refused by a check of ours, in three parts.

Refused: a ValueError or TypeError from a `raise` of this package, not an error from inside. Three
parts: the rule, what came ("got …") and the remedy, after that or as a list of the known names.
"""

import copy
import math
import re
import traceback
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import ripple_attention as ripple
import ripple_attention.convert as converting
from ripple_attention import (
    LinearAttention,
    Partition,
    RippleAttention,
    SoftmaxAttention,
    SpatialWeights,
    chebyshev,
    create_feature_map,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*nested tensors", "ignore:.*MaskedTensors"
)
HERE = Path(ripple.__file__).parent
nan, inf = math.nan, math.inf
PARTITION = chebyshev(2)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(2, 3, 4, 2, 8, generator=GENERATOR)  # q, k and v
WEIGHTS = torch.rand(2, 3, 4, 2, 3, generator=GENERATOR)
MASK = torch.zeros(2, 3, 4, dtype=torch.bool)
GRID = torch.rand(2, 3, 4, 16, generator=GENERATOR)  # of layers
COUNTS = (0, -1, 2.0, True, None, "3", nan, [3], torch.tensor(3), 2**63)  # that are none
NAMES = ("fast", "", None, 3, b"auto", ["auto"], torch.ones(1))
ANY = ("a dimension more", "a dimension less", "another batch")  # where only the last axes count
FLAGS = (None, "yes", 1, 0.0, torch.ones(1))


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError


def numbers(least=-inf, most=inf):
    """What is no finite number within bounds."""
    outside = [x for x in (least - 1, most + 1) if math.isfinite(x)]
    return (*outside, nan, inf, -inf, 10**400, True, "1", 1j, [1.0], torch.ones(1), np.float32(1))


def not_like(x):
    """What cannot stand in place of a tensor x of floats."""
    others = {
        "a list": x.tolist(),
        "a string": "x",
        "a number": 1.0,
        "an array": x.numpy(),
        "a sparse tensor": x.to_sparse(),
        "a compressed tensor": x.flatten(1).to_sparse_csr(),
        "a tensor on another device": x.to("meta"),
        "a nested tensor": torch.nested.nested_tensor([x[0], x[0]]),
        "a jagged tensor": torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged),
        "a complex tensor": x.cfloat(),
        "integers": x.long(),
        "bools": x > 0,
        "8 bits": x.to(torch.float8_e4m3fn),
        "another type": x.half(),
        "a masked tensor": torch.masked.masked_tensor(x, x > 0),
        "no numbers yet": torch.nn.parameter.UninitializedParameter(),
        "what has no repr": WithoutRepr(),
        "a scalar": x.sum(),
        "a dimension more": x[None],
        "a dimension less": x[0],
        "another batch": torch.cat([x, x]),
        "another width": torch.cat([x, x], -1),
    }
    if x.dtype == torch.bool:
        for name in ("bools", "a number"):
            del others[name]
        others |= {"floats": x.float()}
    return others


def in_place(function, arguments, **options):
    """Calls of a function with something else in place of each of its tensors."""
    for name, x in arguments.items():
        unfit = not_like(x) | ({} if "mask" in name else {"nothing": None})
        for what, other in unfit.items():
            if what == "another width" and name == "v":  # which has its own
                continue
            yield f"{what} as {name}", partial(function, **{**arguments, name: other}, **options)


def with_options(function, *arguments, **options):
    """Calls of a function with each of the wrong values of its options."""
    for name, values in options.items():
        for value in values:
            yield f"{name}={value!r:.40}", partial(function, *arguments, **{name: value})


def operators():
    qkv = {"q": X, "k": X, "v": X}
    full = {**qkv, "spatial_weights": WEIGHTS}
    masked = {**full, "key_padding_mask": MASK}
    partitions = (None, 4, "chebyshev", (0, 1), [0, 1], chebyshev, Partition, torch.ones(1))
    run, tell, soft = ripple.ripple_attention, ripple.explain, ripple.ripple_softmax_attention
    linear, given = ripple.linear_attention, partial
    yield (
        "ripple_attention",
        [
            *in_place(run, masked, partition=PARTITION),
            *with_options(given(run, **full), partition=partitions),
            *with_options(
                given(run, **full, partition=PARTITION),
                implementation=NAMES,
                eps=(*numbers(0), None),
            ),
        ],
    )
    row = X[:, 0, :3]  # (B, P, N, ·)
    prefix = {"prefix_k": row, "prefix_v": row}
    prefix_mask = torch.zeros(2, 3, dtype=torch.bool)
    one_more = full | {"spatial_weights": torch.rand(2, 3, 4, 2, 4)}
    near = ripple.NearSoftmax(X, X, X[..., 0])
    for more in ({}, {"near": near}):
        seen = given(run, **one_more, partition=PARTITION, **more)
        yield (
            f"ripple_attention with prefix tokens, {'by softmax' if more else 'by features'}",
            [
                *in_place(seen, prefix | {"prefix_padding_mask": prefix_mask}),
                ("one weight too few", given(seen, **prefix, spatial_weights=WEIGHTS)),
                (
                    "a mask of no prefix",
                    given(run, **full, partition=PARTITION, prefix_padding_mask=prefix_mask),
                ),
                *[
                    (f"no {one}", given(run, **full, partition=PARTITION, **{one: row}))
                    for one in prefix
                ],
                *with_options(given(seen, **prefix), implementation=NAMES, eps=(*numbers(0), None)),
            ],
        )
    yield (
        "explain",
        [
            *in_place(tell, full, partition=PARTITION),
            *with_options(given(tell, **full), partition=partitions),
            *with_options(given(tell, **full, partition=PARTITION), implementation=NAMES),
        ],
    )
    yield (
        "linear_attention",
        [
            *in_place(linear, {**qkv, "key_padding_mask": MASK}),
            *with_options(given(linear, **qkv), eps=(*numbers(0), None)),
        ],
    )
    negative = {**full, "spatial_weights": -WEIGHTS}
    yield (
        "ripple_softmax_attention",
        [
            *in_place(soft, masked, partition=PARTITION),
            *with_options(given(soft, **full), partition=partitions),
            *with_options(given(soft, **full, partition=PARTITION), scale=numbers()),
            ("negative weights", given(soft, **negative, partition=PARTITION)),
        ],
    )


def partitions():
    made = Partition((0, 2))
    radii = (
        None, 3, "01", (), [], (1.0,), (True,), (-1, 2), (2, 1), (1, 1), (0, nan), (0, "1"),
        count(), (2**63,), (0, 2**63), (0, 2**200), (torch.tensor(1),), {0: 1}.values, range(2**17),
    )  # fmt: skip
    grids = (
        None, 5, "34", (3,), (3, 4, 5), (0, 4), (3, -1), (-1, -5), (2.5, 3), (True, 3), (None, 3),
        ("3", "4"), torch.tensor([3, 4]), (2**63, 3),
    )  # fmt: skip
    yield "Partition", with_options(Partition, radii=radii)
    yield "chebyshev", with_options(chebyshev, max_distance=COUNTS)
    yield "logarithmic", with_options(ripple.logarithmic, max_distance=COUNTS)
    yield "dense", with_options(ripple.dense, grid_size=grids)
    counts = (*COUNTS, 2**40)
    yield (
        "foveal",
        with_options(ripple.foveal, max_distance=(*counts, 9), tile=counts, rings=counts),
    )
    coarse = partial(ripple.Partition, (0, 1))
    yield (
        "Partition with tiles",
        [
            *with_options(partial(coarse, tile_radii=[1]), tile=(*COUNTS, 1, 2**40)),
            *with_options(
                partial(coarse, tile=8),
                tile_radii=((), 1, None, (0,), (2, 1), (1.0,), (True,), "1", (2**40,)),
            ),
        ],
    )
    yield (
        "Partition's methods",
        [
            *with_options(made.group_of_distance, size=(-1, 2.0, None, "3", True)),
            *with_options(partial(made.groups, (0, 0)), grid_size=grids),
            *with_options(
                partial(made.groups, grid_size=(3, 4)),
                query=((3, 0), (0, 4), (-1, 0), None, 1, (1,), (0.5, 0), (0, None), "00"),
            ),
            *with_options(made.pair_groups, grid_size=[x for x in grids if x != (0, 4)]),
        ],
    )


def weights():
    tensors = [None, [0.5, 0.5], "x", 1.0, WEIGHTS.numpy(), WEIGHTS.long(), WEIGHTS.cfloat()]
    tensors += [torch.tensor(1.0), torch.ones(3, 0), WEIGHTS.to_sparse(), WEIGHTS > 0]
    tails = ("shared", None, 1, ["share"])
    yield (
        "stick_breaking",
        [
            *with_options(ripple.stick_breaking, stick_logits=tensors),
            *with_options(ripple.stick_breaking, WEIGHTS, balanced=FLAGS),
        ],
    )
    yield "fixed_weights", with_options(ripple.fixed_weights, num_groups=(*COUNTS, 1, 2**31 - 1))
    for function in (ripple.halt, ripple.halt_group):
        yield (
            function.__name__,
            [
                *with_options(partial(function, threshold=0.1), weights=tensors),
                *with_options(function, WEIGHTS, threshold=(*numbers(0, 1), None)),
                *with_options(partial(function, WEIGHTS, 0.1), tail=tails),
            ],
        )
    layer = SpatialWeights(8, 2, 3)
    yield "SpatialWeights", [
        *with_options(partial(SpatialWeights, num_heads=2, num_groups=3), value_dim=COUNTS),
        *with_options(partial(SpatialWeights, 8, num_groups=3), num_heads=COUNTS),
        *with_options(partial(SpatialWeights, 8, 2), num_groups=(*COUNTS, 1, 2**31 - 1)),
        *with_options(
            partial(SpatialWeights, 8, 2, 3), kind=NAMES, balanced=FLAGS, tail=tails,
            halt_threshold=(*numbers(0, 1), None),
        ),
        *[
            (f"{what} as v", partial(layer, v=x))
            for what, x in not_like(X).items()
            if what not in ANY
        ],
        ("other heads", partial(layer, X[:, :, :, :1])),
        ("other width", partial(layer, X[..., :4])),
    ]  # fmt: skip


def maps():
    scalings = ("long", None, 1, ["unit"])
    make = partial(create_feature_map, head_dim=8)
    yield (
        "create_feature_map",
        [
            *with_options(make, name=NAMES),
            *with_options(partial(make, "learned"), scaling=scalings, num_heads=COUNTS, steps=(3,)),
            *with_options(partial(make, "dpfp"), num_features=(9, 0, -16, 8.0, "16", True)),
            *with_options(partial(make, "hedgehog"), num_features=(9, 18, 0, 8.0, "8", True)),
            *with_options(partial(make, "rfa"), num_features=(9, 0, -2, 8.0, "8", True)),
            *with_options(partial(make, "elu"), num_features=(9, 0, 8.0, "8", True)),
            *with_options(partial(make, "t2r"), num_heads=COUNTS),
        ],
    )
    for name, kind in ripple.FEATURE_MAPS.items():
        counts = [x for x in COUNTS if x is not None]
        yield (
            f"{name} map",
            [
                *with_options(kind, head_dim=COUNTS),
                *with_options(partial(kind, 8), num_features=counts, scaling=scalings),
                *of_a_map(create_feature_map(name, 8, num_heads=2)),
            ],
        )
    base = partial(ripple.FeatureMap, num_features=8, scaling="unit")
    yield (
        "FeatureMap",
        [
            *with_options(base, head_dim=COUNTS),
            *with_options(partial(base, 8), num_features=COUNTS, scaling=scalings),
            ("not written", partial(ripple.FeatureMap(8, 8, "unit"), X)),
        ],
    )


def of_a_map(made):
    unfit = {what: x for what, x in not_like(X).items() if what not in ANY}
    if made._matrix() is None:  # takes any type of floats
        del unfit["another type"]
    if not made.state_dict():  # and any device
        del unfit["a tensor on another device"]
    return [(f"{what} as q", partial(made, q=x)) for what, x in unfit.items()] + [
        (f"{what} as k", partial(made, q=X, k=x)) for what, x in unfit.items()
    ]


def layers():
    for kind in (SoftmaxAttention, LinearAttention, RippleAttention):
        layer, name, counts = kind(16, num_heads=2), kind.__name__, COUNTS
        common = [
            *with_options(partial(kind, num_heads=2), dim=(*counts, 15)),
            *with_options(partial(kind, 16), num_heads=(*counts, 3)),
            *with_options(
                partial(kind, 16, 2), qkv_bias=FLAGS, proj_drop=(*numbers(0, 1), None),
                attn_drop=(*numbers(0, 1), None), dtype=(torch.int32, torch.complex64, "float"),
            ),
        ]  # fmt: skip
        sizes = (12, (12,), (3, 5), (5, 3), (-3, -4), (2.0, 6), "34", (None, 12), (3, 4, 1), 2**63)
        tokens = GRID.flatten(1, 2)
        calls = [
            *in_place(layer, {"x": GRID, "key_padding_mask": MASK}),
            *[(f"{what} as value", partial(layer, GRID, x)) for what, x in not_like(GRID).items()],
            *with_options(partial(layer, tokens), grid_size=sizes),
            ("another order", partial(layer, GRID.movedim(-1, 1))),
            ("two dimensions", partial(layer, GRID[0, 0])),
            ("a mask of other tokens", partial(layer, tokens, key_padding_mask=MASK)),
        ]
        yield name, [*common, *calls]
    linear = (LinearAttention, RippleAttention)
    for kind in linear:
        yield (
            f"{kind.__name__}'s map",
            [
                *with_options(
                    partial(kind, 16, 2),
                    eps=(*numbers(0), None),
                    feature_map=("fast", 3, torch.relu, torch.nn.ReLU(), ripple.FeatureMap),
                    num_features=[x for x in COUNTS if x is not None],
                    feature_map_options=({"steps": 3}, {"scaling": "long"}, "unit", ["scaling"], 3),
                ),
                (
                    "a map of other heads",
                    partial(kind, 16, 2, feature_map=create_feature_map("elu", 4)),
                ),
                ("explain of a list", partial(kind(16, 2).explain, [1.0])),
                ("explain of tokens", partial(kind(16, 2).explain, GRID.flatten(1, 2))),
                ("explain of other channels", partial(kind(16, 2).explain, GRID[..., :8])),
            ],
        )
    yield (
        "RippleAttention's rings",
        with_options(
            partial(RippleAttention, 16, 2),
            max_distance=COUNTS,
            partition=("dense", None, 4, (0, 1), [0, 1], chebyshev, Partition),
            weights=NAMES,
            balanced=FLAGS,
            halt_threshold=(*numbers(0, 1), None),
            tail=("shared", None, 1),
            near=NAMES,
            near_distance=(-1, 9, True, 2.0, "3", 2),
            num_prefix_tokens=[x for x in COUNTS if type(x) is not int or x],
            implementation=NAMES,
        ),
    )
    near = {"q": X, "k": X, "far_scale": X[..., 0]}
    run = partial(ripple.ripple_attention, X, X, X, WEIGHTS, partition=PARTITION)
    yield (
        "NearSoftmax",
        [
            (what, partial(run, near=ripple.NearSoftmax(**{**near, name: other})))
            for name, unfit in (
                ("q", not_like(X)),
                ("k", not_like(X)),
                ("far_scale", not_like(X[..., 0])),
                ("distance", dict(enumerate((-1, 2, 0.5, "1", True, [1])))),
                ("scale", dict(enumerate(numbers()))),
            )
            for what, other in ((f"{what} as {name}", x) for what, x in unfit.items())
            if what != "another type as far_scale"
        ]
        + list(with_options(run, near=("softmax", 1))),
    )
    heads = partial(ripple.RippleHeads, 8, 2)
    row = X.flatten(1, 2)
    yield "RippleHeads", [
        *with_options(partial(heads(), row, row, row), grid_size=sizes),
        *with_options(partial(ripple.RippleHeads, num_heads=2), head_dim=COUNTS),
        *with_options(partial(ripple.RippleHeads, 8), num_heads=COUNTS),
        *with_options(
            heads,
            max_distance=COUNTS, weights=NAMES, near=NAMES, near_distance=(1, -1, "1"),
            num_prefix_tokens=(-1, 1.0, "1", None, True), eps=(*numbers(0), None),
            implementation=NAMES, scale=numbers(),
        ),
        *in_place(partial(heads(), grid_size=(3, 4)), {"q": row, "k": row, "v": row}),
    ]  # fmt: skip
    others = (create_feature_map("elu", 4),)
    yield (
        "RippleHeads' map",
        with_options(
            heads,
            feature_map=(*others, 3, torch.relu, "fast"),
            feature_map_options=(3, "unit", ["x"]),
        ),
    )
    record = lambda model: ripple.record_spatial_weights(model).__enter__()
    yield (
        "record_spatial_weights",
        with_options(
            record, model=(None, "model", [RippleAttention(16, 2)], torch.nn.Linear(2, 2), X)
        ),
    )


def conversions():
    timm = pytest.importorskip("timm")
    made = timm.create_model("test_vit", embed_dim=16, num_heads=2, depth=2)

    def convert(*arguments, **options):
        return converting.convert(copy.deepcopy(made), *arguments, **options)

    there = copy.deepcopy(made)
    converting.convert(there)
    integers = copy.deepcopy(made).requires_grad_(False)
    for x in integers.parameters():
        x.data = x.data.char()
    nothing = (None, "a model", 3, [made], X, torch.nn.Linear)
    without = (torch.nn.Linear(2, 2), torch.nn.Sequential(), torch.nn.MultiheadAttention(4, 2))
    yield "convert", [
        *with_options(converting.convert, model=(*nothing, *without, there, integers)),
        *with_options(
            convert,
            blocks=(
                *("some", None, 3, 1.5, b"1", object(), X, {0: 1}, [], set(), lambda *_: False),
                *([1.0], ["1"], [True], [-1], [2], [[1]], [None]),
            ),
            near=NAMES, max_distance=COUNTS, weights=NAMES, implementation=NAMES,
            partition=("x", None, 3, (1, 0), ("a",), [[0]], [None], [True], [2**63], {}, chebyshev),
            patches=("nowhere", 3, [], b"x", made), nonsense=(1,), eps=(*numbers(0), None),
            scale=(1.0,), head_dim=(8,), num_heads=(2,), num_prefix_tokens=(1,), dtype=(X.dtype,),
            device=("cpu",),
        ),
        ("an attention without an image", partial(there.blocks[0].attn, GRID.flatten(1, 2))),
    ]  # fmt: skip
    yield "revert", with_options(converting.revert, model=nothing)
    yield "converted", with_options(lambda model: [*converting.converted(model)], model=nothing)
    for_what = (None, 3, [1], object, torch.relu)
    yield "adapts", with_options(lambda kind: converting.adapts(kind)(None), kind=for_what)
    yield (
        "Partition.from_bounds",
        with_options(
            Partition.from_bounds,
            bounds=(
                None,
                3,
                "01",
                [],
                [True],
                [1.0],
                [0, -3],
                [1, -1, 1],
                [0, -8, 0],
                [[0]],
                {0: 1},
            ),
        ),
    )


KINDS = (operators, partitions, weights, maps, layers, conversions)


@pytest.fixture(scope="module")
def calls():
    """By function, the calls that it must refuse, by what is wrong."""
    return {name: dict(of_one) for kind in KINDS for name, of_one in kind()}


def complaint(call):
    """What is wrong with how a call is refused; None where nothing is."""
    try:
        call()
    except (ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not (Path(last.filename).is_relative_to(HERE) and last.line.startswith("raise")):
            return f"from inside, {Path(last.filename).name}:{last.lineno}: {error!r:.150}"
        if not re.search(r"\S{2}.*(one of .*; got |\bgot .*[.:;,] \S)", str(error), re.DOTALL):
            return f"not in three parts: {error}"
    except Exception as error:
        return f"a {type(error).__name__}: {error!s:.150}"
    else:
        return "taken"


def test_invalid_calls_are_refused_in_three_parts(calls):
    wrong = [
        f"{name}, {what}: {found}"
        for name, of_one in calls.items()
        for what, call in of_one.items()
        if (found := complaint(call)) is not None
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {sum(map(len, calls.values()))}", *wrong])


def test_all_public_names_are_tried(calls):
    tried = " ".join(calls)
    assert all(name in tried for name in ripple.__all__ if name != "FEATURE_MAPS")
    assert {"convert", "revert", "converted", "adapts"} <= calls.keys()
    assert sum(map(len, calls.values())) >= 259


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_operators_take_grids_without_tokens(shape):
    x = torch.rand(*shape, 8, requires_grad=True)
    inputs, mask = (x, x, x, torch.rand(*shape, 3)), torch.zeros(shape[:3], dtype=torch.bool)
    for out in (
        ripple.ripple_attention(*inputs, partition=PARTITION, key_padding_mask=mask),
        ripple.ripple_softmax_attention(*inputs, partition=PARTITION, key_padding_mask=mask),
        ripple.linear_attention(x, x, x, key_padding_mask=mask),
    ):
        assert out.shape == x.shape
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_odd_calls_that_are_right_are_taken():
    run = partial(ripple.ripple_attention, X, X, X)
    wide = run(WEIGHTS[..., :2], partition=Partition((2**30 - 1,)))
    alone = run(WEIGHTS[..., :2], partition=Partition((3,)))
    assert torch.equal(wide, alone)
    assert ripple.logarithmic(2**30 - 1).reach == 2**30 - 1
    assert chebyshev(2**16).num_groups == 2**16 + 1
    assert ripple.dense([1, 1]).num_groups == 2
    nothing = X[..., :0]  # no features: no query sees anything; no channels: nothing comes out
    assert not ripple.ripple_attention(nothing, nothing, X, WEIGHTS, partition=PARTITION).any()
    assert not ripple.ripple_softmax_attention(
        nothing, nothing, nothing, WEIGHTS, partition=PARTITION
    ).numel()
    away = [x.to("meta") for x in (X, X, X, WEIGHTS)]
    assert ripple.ripple_attention(*away, partition=PARTITION, eps=np.float64(1)).is_meta
    layer = RippleAttention(16, num_heads=2)
    assert torch.equal(layer(GRID.flatten(1, 2), grid_size=[3, 4]), layer(GRID).flatten(1, 2))


def test_negative_weights_of_ripple_softmax_are_never_silent():
    def run(weights):
        return ripple.ripple_softmax_attention(X, X, X, weights, partition=PARTITION)

    torch._dynamo.reset()
    assert torch.compile(run, backend="eager", fullgraph=True)(-WEIGHTS).isnan().all()
    with pytest.raises(ValueError, match="must be ≥ 0"):
        run(-WEIGHTS)
