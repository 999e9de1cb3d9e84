"""A layer that a user changed computes what they wrote, whatever runs underneath.

Each layer is changed in one of many ways. All implementations must then give the outputs and
gradients of the definition, and the change must have had its effect.
"""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations, parametrize

from inputs import relative_error
from kernels import interpreted, needs_triton
from ripple_attention import RippleAttention, SpatialWeights, record_spatial_weights
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


class NearSighted(SpatialWeights):
    def forward(self, v):
        weights = super().forward(v)
        return weights * torch.tensor([2.0, 1.0, 0.5])


def louder_output(module, inputs, output):
    return tuple(1.5 * x for x in output) if isinstance(output, tuple) else 1.5 * output


def shifted_input(module, inputs):
    return (inputs[0] + 1, *inputs[1:])


def steeper(module, *grads):
    return tuple(None if x is None else 2 * x for x in grads[0])


def reload(layer, kind=RippleAttention, **options):
    new = kind(16, num_heads=2, max_distance=2, implementation=layer.implementation, **options)
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
    layer.spatial_weights = NearSighted(8, 2, 3)
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


def adapts(name):
    def customise(layer):
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(layer, LoraConfig(r=2, target_modules=f".*{name}|{name}"))
        for adapter, parameter in wrapped.named_parameters():
            parameter.requires_grad_()
            if "lora_B" in adapter:
                nn.init.normal_(parameter, std=0.3)
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


PLAIN = (
    overrides_attend,
    patches_attend,
    takes_a_map_of_ones_own,
    takes_weights_of_ones_own,
    patches_a_map,
    patches_weights,
    exchanges_a_projection,
    parametrizes,
    normalises_spectra,
    quantises,
)
LOUD = {  # what changes the function
    **{customise.__name__: customise for customise in PLAIN},
    **{f"lora on {name}": adapts(name) for name in PROJECTIONS},
    **{f"hook of {name or 'layer'}": hooks("forward_hook", name, louder_output) for name in PARTS},
    **{
        f"pre-hook of {name or 'layer'}": hooks("forward_pre_hook", name, shifted_input)
        for name in PARTS
    },
}
QUIET = {  # what leaves it alone, and changes gradients perhaps
    "deepcopy": copy.deepcopy,
    "sharded projections": shards,
    "sharded map and weights": shards_parts,
    "a sharded layer": shards_it_all,
    **{
        f"backward {kind} of {name or 'layer'}": hooks(f"full_backward_{kind}", name, steeper)
        for kind in ("hook", "pre_hook")
        for name in PARTS
    },
}
IMPLEMENTATIONS = ("naive", "table", "tiled", "tiled_triton", "naive_triton")


def results(layer, x, value):
    """The output, and the gradients of x, the values and every parameter; 0 where there is none."""
    layer.zero_grad()
    leaves = [t.clone().requires_grad_() for t in (x, value) if t is not None]
    out = layer(*leaves)
    (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
    grads = []
    for leaf in (*leaves, *layer.parameters()):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grads.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return out.detach(), *grads


def make_layer(implementation):
    torch.manual_seed(0)
    layer = RippleAttention(16, num_heads=2, max_distance=2, implementation=implementation)
    nn.init.normal_(layer.spatial_weights.embedding)
    return layer


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
                layer = make_layer(implementation)
                layer = (LOUD | QUIET)[change](layer) or layer
                got = results(layer, x, value)
                difference = relative_error(got[0], plain)
                assert difference > 1e-3 if change in LOUD else difference < 1e-5
                expected = expected or got
                for ours, reference in zip(got, expected, strict=True):
                    assert relative_error(ours, reference) < 2e-5, implementation
    finally:
        if grouped:
            distributed.destroy_process_group()


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
