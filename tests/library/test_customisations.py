"""A layer that a user changed computes what they wrote, whatever runs underneath.

Each layer is changed in one of many ways. All implementations must then give the outputs and
gradients of the definition, and the change must have had its effect; or all refuse it, in the same
words.
"""

import copy
from functools import partial
from pkgutil import resolve_name

import pytest
import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from inputs import relative_error
from kernels import interpreted, needs_triton
from ripple_attention import (
    LinearAttention,
    RippleAttention,
    SpatialWeights,
    chebyshev,
    create_feature_map,
    record_spatial_weights,
)
from ripple_attention.feature_maps import Learned

pytestmark = needs_triton

PROJECTIONS = ("qkv", "proj", "feature_map.fc", "spatial_weights.proj")
PARTS = (*PROJECTIONS, "feature_map", "spatial_weights", "")  # the last: the layer


class Louder(nn.Module):
    def forward(self, x):
        return 1.5 * x


class AttendsTwice(RippleAttention):
    def attend(self, q, k, v, key_padding_mask):
        return 2 * super().attend(q, k, v, key_padding_mask)


class LoudMap(Learned):
    def features(self, x, draw, *, is_key):
        return 1.5 * super().features(x, draw, is_key=is_key)


class LoudScale(Learned):
    def scale(self, x):
        return 1.5 * super().scale(x)


class LoudTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return 1.5 * out if function is nn.functional.linear else out


class StartsElsewhere(Learned):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.ones_(self.fc.bias)


class NearSighted(SpatialWeights):
    def forward(self, v):
        return fading(super().forward(v))


class Wrapper(nn.Module):
    """Has what the module within has, and computes more."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *inputs):
        return louder_output(self, inputs, self.module(*inputs))


class Exponential(nn.Module):
    def forward(self, q, k):
        return q.exp(), k.exp()


def fading(weights):
    return weights * 0.5 ** torch.arange(weights.shape[-1])


def louder_output(module, inputs, output):
    return tuple(1.5 * x for x in output) if isinstance(output, tuple) else 1.5 * output


def shifted_input(module, inputs):
    return (inputs[0] + 1, *inputs[1:])


def steeper(module, *grads):
    return tuple(None if x is None else 2 * x for x in grads[0])


def reload(layer, kind=RippleAttention, **options):
    options = {"feature_map": "learned", "near": layer.near} | options
    options |= {"num_prefix_tokens": layer.num_prefix_tokens, "max_distance": 2}
    new = kind(16, num_heads=2, implementation=layer.implementation, **options)
    new.load_state_dict(layer.state_dict())
    return new


def overrides_attend(layer):
    return reload(layer, AttendsTwice)


def patches_attend(layer):
    attend = layer.attend
    layer.attend = lambda *arguments: 2 * attend(*arguments)


def takes_a_map_of_ones_own(layer):
    return reload(layer, feature_map=LoudMap(8, 8))


def takes_weights_of_ones_own(layer):
    old = layer.spatial_weights
    layer.spatial_weights = NearSighted(8, 2, old.num_groups)
    layer.spatial_weights.load_state_dict(old.state_dict())


def patches_a_map(layer):
    forward = layer.feature_map.forward
    layer.feature_map.forward = lambda q, k: forward(q + 1, k)


def patches_weights(layer):
    forward = layer.spatial_weights.forward
    layer.spatial_weights.forward = lambda v: forward(1.5 * v)


def exchanges_a_projection(layer):
    layer.feature_map.fc = nn.Sequential(layer.feature_map.fc, Louder())


def hooks(kind, name, hook):
    def customise(layer):
        getattr(layer.get_submodule(name), f"register_{kind}")(hook)

    return customise


def parametrizes(layer):
    parametrize.register_parametrization(layer.feature_map.fc, "weight", Louder())
    parametrize.register_parametrization(layer.spatial_weights, "embedding", Louder())


def normalises_spectra(layer):
    layer.eval()  # the estimate of the norm is not renewed
    for name in PROJECTIONS:
        parametrizations.spectral_norm(layer.get_submodule(name))


def adapts(name, merged=False):
    def customise(layer):
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(layer, LoraConfig(r=2, target_modules=f".*{name}|{name}"))
        for adapter, parameter in wrapped.named_parameters():
            parameter.requires_grad_()
            if "lora_B" in adapter:
                nn.init.normal_(parameter, std=0.3)
        if merged:
            wrapped.merge_adapter()
        return wrapped

    return customise


def quantises(layer):
    layer.eval()
    torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, inplace=True)


def shards(layer):
    from torch.distributed.fsdp import fully_shard

    for name in PROJECTIONS:
        fully_shard(layer.get_submodule(name))


def shards_parts(layer):
    from torch.distributed.fsdp import fully_shard

    for name in ("feature_map", "spatial_weights"):
        fully_shard(layer.get_submodule(name))


def shards_it_all(layer):
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer)


def patches_the_call_of_a_map(layer):
    call = layer.feature_map._call_impl
    layer.feature_map._call_impl = lambda *inputs: louder_output(None, None, call(*inputs))


def changes_the_class_of_a_map(layer):
    layer.feature_map.__class__ = LoudMap


def changes_a_helper_of_a_map(layer):
    layer.feature_map.__class__ = LoudScale


def has_parameters_of_a_subclass(layer):
    for projection in (layer.feature_map.fc, layer.spatial_weights.proj):
        projection.weight = nn.Parameter(projection.weight.data.as_subclass(LoudTensor))


def has_a_map_that_starts_elsewhere(layer):
    layer.feature_map = StartsElsewhere(8, 8)


def exchanges_a_map(layer):
    layer.feature_map = create_feature_map("t2r", 8, num_heads=2)


def exchanges_a_map_for_any_module(layer):
    layer.feature_map = Exponential()


def prunes(layer):
    prune.random_unstructured(layer.feature_map, "w1", 0.5)
    prune.random_unstructured(layer.spatial_weights.proj, "weight", 0.5)


def wraps(name):
    def customise(layer):
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, Wrapper(layer.get_submodule(name)))

    return customise


def compiles_and_hooks(layer):
    layer.feature_map = torch.compile(layer.feature_map, backend="eager")
    layer.feature_map.register_forward_hook(louder_output)
    layer.spatial_weights = torch.compile(layer.spatial_weights, backend="eager")
    layer.spatial_weights.register_forward_hook(lambda module, inputs, output: fading(output))


def ties(layer):
    layer.feature_map.w1 = layer.spatial_weights.proj.weight


def assigns(layer):
    state = {name: 1.1 * x for name, x in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def stretches_parameters(layer):
    for name in ("w1", "fc.weight", "fc.bias"):
        parent, _, own = f"feature_map.{name}".rpartition(".")
        module = layer.get_submodule(parent)
        wide = torch.stack([1.5 * getattr(module, own).data] * 2, -1)
        setattr(module, own, nn.Parameter(wide[..., 0]))


def assigns_to(name, value):
    def customise(layer):
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, value)

    return customise


def converts(name, dtype):
    def customise(layer):
        layer.get_submodule(name).to(dtype)

    return customise


def compiles_in_place(layer):
    layer.feature_map.compile(backend="eager")
    layer.spatial_weights.compile(backend="eager")


def normalises_weights(layer):
    for name in PROJECTIONS:
        parametrizations.weight_norm(layer.get_submodule(name))


def scripts(layer):
    layer.feature_map.fc = torch.jit.script(layer.feature_map.fc)
    layer.spatial_weights.proj = torch.jit.script(layer.spatial_weights.proj)


def is_made_without_memory(layer):
    state = layer.state_dict()
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)


def swaps_parameters(layer):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def is_parallel(layer):
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "qkv": ColwiseParallel(),
        "feature_map.fc": ColwiseParallel(),
        "proj": RowwiseParallel(),
    }
    parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)


PLAIN = (
    overrides_attend,
    patches_attend,
    takes_a_map_of_ones_own,
    takes_weights_of_ones_own,
    patches_a_map,
    patches_weights,
    exchanges_a_projection,
    patches_the_call_of_a_map,
    changes_the_class_of_a_map,
    changes_a_helper_of_a_map,
    has_parameters_of_a_subclass,
    has_a_map_that_starts_elsewhere,
    exchanges_a_map,
    exchanges_a_map_for_any_module,
    prunes,
    compiles_and_hooks,
    ties,
    assigns,
    stretches_parameters,
    parametrizes,
    normalises_spectra,
    quantises,
)
LOUD = {  # what changes the function
    **{customise.__name__: customise for customise in PLAIN},
    **{f"lora on {name}": adapts(name) for name in PROJECTIONS},
    "lora merged": adapts("feature_map.fc", merged=True),
    **{f"hook of {name or 'layer'}": hooks("forward_hook", name, louder_output) for name in PARTS},
    **{
        f"pre-hook of {name or 'layer'}": hooks("forward_pre_hook", name, shifted_input)
        for name in PARTS
    },
    **{f"wrapped {name}": wraps(name) for name in PARTS if name},
    **{
        f"{name} is {value}": assigns_to(name, value)
        for name, value in {
            "eps": 0.25,
            "feature_map.scaling": "scaled",
            "spatial_weights.halt_threshold": 0.8,
            "spatial_weights.balanced": False,
            "spatial_weights.kind": "truncated",
        }.items()
    },
}
QUIET = {  # what leaves it alone, and changes gradients perhaps
    "deepcopy": copy.deepcopy,
    **{
        customise.__name__: customise
        for customise in (
            compiles_in_place,
            normalises_weights,
            scripts,
            is_made_without_memory,
            swaps_parameters,
        )
    },
    "sharded over heads": is_parallel,
    "sharded projections": shards,
    "sharded map and weights": shards_parts,
    "a sharded layer": shards_it_all,
    **{
        f"backward {kind} of {name or 'layer'}": hooks(f"full_backward_{kind}", name, steeper)
        for kind in ("hook", "pre_hook")
        for name in PARTS
    },
}
REFUSED = {
    "a map of other heads": assigns_to("feature_map", create_feature_map("t2r", 8)),
    "a map of another width": assigns_to("feature_map", create_feature_map("elu", 4)),
    "a map of another type": converts("feature_map", torch.float64),
    "a scaling that is none": assigns_to("feature_map.scaling", "length"),
    "weights of other heads": assigns_to("spatial_weights", SpatialWeights(8, 1, 3)),
    "weights of another width": assigns_to("spatial_weights", SpatialWeights(4, 2, 3)),
    "weights of other groups": assigns_to("spatial_weights", SpatialWeights(8, 2, 7)),
    "weights of another type": converts("spatial_weights", torch.float16),
    "weights of another kind": assigns_to("spatial_weights.kind", "softmax"),
    "weights that a hook makes double": hooks(
        "forward_hook", "spatial_weights", lambda module, inputs, output: output.double()
    ),
    "a threshold beyond 1": assigns_to("spatial_weights.halt_threshold", 2.0),
    "balance that is no flag": assigns_to("spatial_weights.balanced", "yes"),
    "another partition": assigns_to("partition", chebyshev(4)),
    "a negative eps": assigns_to("eps", -1.0),
}
IMPLEMENTATIONS = ("naive", "table", "tiled", "tiled_triton", "naive_triton")
KINDS = {
    "softmax": {"near": "softmax", "feature_map": "learned"},
    "prefix": {"num_prefix_tokens": 2},
}
NO_EFFECT = {  # on layers of a kind: means by softmax have no eps, rows of tokens no `attend`
    "softmax": {"eps is 0.25", "hook of spatial_weights", "wrapped spatial_weights"},
    "prefix": {"overrides_attend", "patches_attend"},
}


def results(layer, x, value=None, **options):
    """The output, and the gradients of x, the values and every parameter; 0 where there is none."""
    layer.zero_grad()
    leaves = [t.clone().requires_grad_() for t in (x, value) if t is not None]
    out = layer(*leaves, **options)
    (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
    grads = []
    for leaf in (*leaves, *layer.parameters()):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grads.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return out.detach(), *grads


def make_layer(implementation, **options):
    torch.manual_seed(0)
    options = {"max_distance": 2, "implementation": implementation, **options}
    layer = RippleAttention(16, num_heads=2, **options)
    nn.init.normal_(layer.spatial_weights.embedding)
    return layer


def change_layer(change, layer):
    torch.manual_seed(1)
    return (LOUD | QUIET | REFUSED)[change](layer) or layer


@pytest.mark.parametrize("change", [*LOUD, *QUIET])
@interpreted
def test_every_implementation_computes_what_the_user_wrote(change):
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, 1, 3, 4, 16, generator=generator)
    grouped = "sharded" in change
    if grouped:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for value in (None, other):
            expected, plain = None, make_layer("naive")(x, value)
            for implementation in IMPLEMENTATIONS:
                layer = change_layer(change, make_layer(implementation))
                got = results(layer, x, value)
                difference = relative_error(got[0], plain)
                assert difference > 1e-3 if change in LOUD else difference < 1e-5
                expected = expected or got
                for ours, reference in zip(got, expected, strict=True):
                    assert relative_error(ours, reference) < 2e-5, implementation
    finally:
        if grouped:
            distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_softmax_and_prefix_tokens_change_nothing_of_that(kind):
    options, first = KINDS[kind], KINDS[kind].get("num_prefix_tokens", 0)
    x = torch.randn(1, first + 12, 16, generator=torch.Generator().manual_seed(1))
    plain = results(make_layer("naive", **options), x, grid_size=(3, 4))[0]
    for change in (LOUD | QUIET).keys() - NO_EFFECT[kind]:
        if "sharded" in change or change.endswith(("of layer", " qkv", " of proj", "on proj")):
            continue
        layers = [
            change_layer(change, make_layer(name, **options)) for name in ("naive", "tiled_triton")
        ]
        expected, got = (results(layer, x, grid_size=(3, 4)) for layer in layers)
        difference = relative_error(expected[0], plain)
        assert difference > 1e-3 if change in LOUD else difference < 1e-5, change
        for ours, reference in zip(got, expected, strict=True):
            assert relative_error(ours, reference) < 2e-5, change


@pytest.mark.parametrize("kind", ["", *KINDS])
@interpreted
def test_every_implementation_refuses_what_does_not_fit_in_the_same_words(kind):
    options = KINDS.get(kind, {})
    x = torch.randn(1, options.get("num_prefix_tokens", 0) + 12, 16)
    for change in REFUSED.keys() - ({"a negative eps"} if "near" in options else set()):
        said = []
        for implementation in IMPLEMENTATIONS:
            layer = change_layer(change, make_layer(implementation, **options))
            with pytest.raises(ValueError, match="got") as refusal:
                layer(x, grid_size=(3, 4))
            said.append(str(refusal.value))
        assert len(set(said)) == 1, change


@pytest.mark.parametrize(
    "change",
    [
        *(f"{kind} of {name}" for kind in ("hook", "pre-hook") for name in PROJECTIONS[:3]),
        *("lora on feature_map.fc", "wrapped feature_map", "eps is 0.25", "patches_attend"),
        *("exchanges_a_map_for_any_module", "changes_the_class_of_a_map", "deepcopy"),
    ],
)
@interpreted
def test_linear_attention_computes_what_the_user_wrote(change):
    x, found = torch.randn(1, 3, 4, 16, generator=torch.Generator().manual_seed(1)), []
    for implementation in ("naive", "tiled_triton"):
        torch.manual_seed(0)
        layer = LinearAttention(16, num_heads=2)
        layer.implementation = implementation
        plain = layer(x)
        found.append(results(change_layer(change, layer), x))
    assert (relative_error(found[0][0], plain) > 1e-3) == (change in LOUD)
    for ours, reference in zip(*found, strict=True):
        assert relative_error(ours, reference) < 2e-5


@pytest.mark.parametrize(
    "patched",
    [
        "ripple_attention.heads.RippleCore.attend",
        "ripple_attention.RippleAttention.attend",
        "ripple_attention.LinearAttention.attend",
        "ripple_attention.feature_maps._sines",
        "ripple_attention.spatial_weights.halt",
        "torch.nn.Linear.forward",
    ],
)
@interpreted
def test_what_is_patched_after_it_ran_runs_the_patch(patched):
    layer = make_layer("tiled_triton")
    if "LinearAttention" in patched:
        layer = LinearAttention(16, num_heads=2)
        layer.implementation = "tiled_triton"
    x = torch.randn(1, 3, 4, 16)
    plain, function = layer(x), resolve_name(patched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, lambda *inputs: function(*inputs).square())
        got, layer.implementation = layer(x), "naive"
        assert relative_error(got, layer(x)) < 2e-5
    assert relative_error(got, plain) > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@interpreted
def test_checkpointed_layers_have_the_same_gradients(implementation):
    layer = make_layer(implementation)
    x = torch.randn(1, 3, 4, 16)
    expected = results(layer, x)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for ours, reference in zip(results(layer, x), expected, strict=True):
        assert torch.equal(ours, reference)


@interpreted
def test_kernels_stand_in_for_a_layer_as_it_is_written():
    """Else the test above would compare PyTorch with PyTorch."""
    x = torch.randn(1, 4, 5, 16)
    layer = make_layer("tiled_triton")
    assert layer.explain(x) == "fused"
    for customise in (copy.deepcopy, parametrizes):
        assert (customise(layer) or layer).explain(x) == "fused"
    for customise in (patches_weights, patches_a_map, patches_attend):
        layer = make_layer("tiled_triton")
        customise(layer)
        expected = "fused" if customise is patches_weights else "tiled_triton"
        assert layer.explain(x) == expected


@interpreted
def test_looking_at_spatial_weights_changes_no_bit():
    x = torch.randn(2, 4, 5, 16)
    for implementation in IMPLEMENTATIONS:
        layer = make_layer(implementation)
        expected = layer(x)
        with record_spatial_weights(layer) as seen:
            assert torch.equal(layer(x), expected)
        assert seen["spatial_weights"].shape == (2, 4, 5, 2, 3)
