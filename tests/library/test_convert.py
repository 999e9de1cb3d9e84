"""Pretrained transformers with ripples in the place of softmax."""

import copy
import json

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from processes import in_two_ranks
from ripple_attention import foveal
from ripple_attention import models as _names_our_models  # noqa: F401
from ripple_attention.convert import Adapter, Heads, adapts, convert, converted, revert

EVERYWHERE = 24  # a window of this reach covers every grid of these tests


def timm_model(name, **options):
    return timm.create_model(name, num_classes=5, **options)


def vit(**options):
    small = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 16, "img_size": 96}
    return timm_model("vit_tiny_patch16_224", **small, dynamic_img_size=True, **options)


def eva(name, **options):
    small = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 16, "img_size": 96}
    return timm_model(name, **{**small, "dynamic_img_size": True, **options})


def hf(model, config, **options):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 96}
    settings = config(**{**small, "patch_size": 16, "intermediate_size": 64, **options})
    return model(settings)


def hf_sam2():
    config = transformers.Sam2HieraDetConfig(
        hidden_size=16,
        num_attention_heads=1,
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 4, 2],
        global_attention_blocks=[3],
        image_size=[128, 128],
    )
    return transformers.models.sam2.modeling_sam2.Sam2HieraDetModel(config)


def hf_sam(**options):
    config = transformers.SamVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=96,
        output_channels=16,
        window_size=3,
        global_attn_indexes=[1],
        mlp_dim=64,
        **options,
    )
    return transformers.SamVisionModel(config)


def deit6(**options):
    small = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 16, "img_size": 96}
    return timm_model("deit6_tiny_patch2_32", **small, **options)


def torchvision_vit():
    return torchvision.models.VisionTransformer(96, 16, 2, 2, 32, 64, num_classes=5)


TALL, WIDE = (96, 96), (64, 128)
MODELS = {
    "timm class token": (lambda: vit(), (TALL, WIDE)),
    "timm class and registers": (lambda: vit(reg_tokens=4), (TALL, WIDE)),
    "timm registers, q and k norms": (
        lambda: vit(class_token=False, reg_tokens=2, global_pool="avg", qk_norm=True),
        (TALL, WIDE),
    ),
    "timm SigLIP": (
        lambda: vit(class_token=False, global_pool="map", qkv_bias=False),
        (TALL, WIDE),
    ),
    "timm DeiT-3": (lambda: vit(init_values=1e-6, no_embed_class=True), (TALL, WIDE)),
    "timm normed output": (lambda: vit(scale_attn_norm=True), (TALL, WIDE)),
    "timm DINOv3": (
        lambda: eva("vit_small_patch16_dinov3", img_size=96),
        (TALL, WIDE),
    ),
    "timm EVA-02": (lambda: eva("eva02_tiny_patch14_224", num_heads=1), (TALL, WIDE)),
    "timm EVA-02, one projection": (
        lambda: eva("eva02_base_patch14_224", qkv_fused=True, qkv_bias=True),
        (TALL, WIDE),
    ),
    "timm PE": (lambda: eva("vit_pe_core_tiny_patch16_384"), (TALL, WIDE)),
    "timm ViT with rope": (lambda: eva("vit_base_patch16_rope_reg1_gap_256"), (TALL, WIDE)),
    "timm ViT with shared keys": (
        lambda: eva("vit_large_patch16_sapiens2", num_kv_heads=1),
        (TALL, WIDE),
    ),
    "timm HieraDet": (
        lambda: timm_model("sam2_hiera_tiny", embed_dim=16, num_heads=1),
        ((256, 256), (192, 320)),
    ),
    "timm SAM": (
        lambda: timm_model(
            "samvit_base_patch16",
            img_size=96,
            embed_dim=32,
            depth=2,
            num_heads=2,
            use_rel_pos=False,
            window_size=3,
            global_attn_indexes=(1,),
        ),
        (TALL, TALL),
    ),
    "transformers ViT": (
        lambda: hf(transformers.ViTModel, transformers.ViTConfig),
        (TALL, WIDE),
    ),
    "transformers DeiT": (
        lambda: hf(transformers.DeiTModel, transformers.DeiTConfig),
        (TALL, WIDE),
    ),
    "transformers I-JEPA": (
        lambda: hf(transformers.IJepaModel, transformers.IJepaConfig),
        (TALL, WIDE),
    ),
    "transformers Dinov2": (
        lambda: hf(transformers.Dinov2Model, transformers.Dinov2Config, mlp_ratio=2),
        (TALL, WIDE),
    ),
    "transformers Dinov2 with registers": (
        lambda: hf(
            transformers.Dinov2WithRegistersModel,
            transformers.Dinov2WithRegistersConfig,
            num_register_tokens=3,
            mlp_ratio=2,
        ),
        (TALL, WIDE),
    ),
    "transformers DINOv3": (
        lambda: hf(
            transformers.DINOv3ViTModel, transformers.DINOv3ViTConfig, num_register_tokens=4
        ),
        (TALL, WIDE),
    ),
    "transformers SigLIP": (
        lambda: hf(transformers.SiglipVisionModel, transformers.SiglipVisionConfig),
        (TALL, WIDE),
    ),
    "transformers CLIP": (
        lambda: hf(transformers.CLIPVisionModel, transformers.CLIPVisionConfig),
        (TALL, WIDE),
    ),
    "transformers OWL-ViT": (
        lambda: hf(transformers.OwlViTVisionModel, transformers.OwlViTVisionConfig),
        (TALL, WIDE),
    ),
    "transformers AIMv2": (
        lambda: hf(transformers.Aimv2VisionModel, transformers.Aimv2VisionConfig),
        (TALL, TALL),
    ),
    "transformers DPT": (
        lambda: hf(transformers.DPTModel, transformers.DPTConfig),
        (TALL, TALL),
    ),
    "transformers SAM": (lambda: hf_sam(use_rel_pos=False), (TALL, TALL)),
    "transformers SAM 2": (hf_sam2, ((128, 128), (128, 192))),
    "our DeiT": (lambda: deit6(), (TALL, WIDE)),
    "our DeiT with class and registers": (
        lambda: deit6(class_token=True, reg_tokens=2),
        (TALL, WIDE),
    ),
    "torchvision": (torchvision_vit, (TALL, TALL)),
}


def made(name):
    """A model of the table; its weights are far from zero, layer scales as well."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def call(model, images):
    """The model's features as one tensor."""
    with torch.no_grad():
        return features(model, images)


def features(model, images):
    if not isinstance(model, transformers.PreTrainedModel):
        return model(images)
    learned = ("ViT", "DeiT", "IJepa", "SiglipVision", "CLIPVision", "OwlViTVision")
    name = type(model).__name__.removesuffix("Model")  # these have positions of one size
    free = {"interpolate_pos_encoding": True} if name in learned else {}
    return model(pixel_values=images, **free).last_hidden_state


def error(out, ref):
    return float(((out - ref).norm() / ref.norm()).detach())


def photos(size, batch=2):
    torch.manual_seed(1)
    return torch.randn(batch, 3, *size)


@pytest.mark.parametrize("name", MODELS)
def test_a_window_that_covers_the_grid_gives_softmax_attention(name):
    model = made(name)
    sizes = MODELS[name][1]
    expected = [call(model, photos(size)) for size in sizes]
    before = model.state_dict()
    report = convert(model, max_distance=EVERYWHERE)
    assert any(block.converted for block in report.blocks)
    for size, ref in zip(sizes, expected, strict=True):
        assert error(call(model, photos(size)), ref) <= 1e-4
    kept = {k: v for k, v in model.state_dict().items() if ".ripple." not in k}
    assert kept.keys() == before.keys()
    assert all(kept[k].data_ptr() == before[k].data_ptr() for k in before)


@pytest.mark.parametrize("name", MODELS)
def test_revert_gives_the_softmax_model_back(name):
    model = made(name)
    size = MODELS[name][1][1]
    expected, names = call(model, photos(size)), [*model.state_dict()]
    report = convert(model, max_distance=1)
    assert error(call(model, photos(size)), expected) > 1e-4
    assert revert(model) == tuple(block.name for block in report.blocks if block.converted)
    assert [*model.state_dict()] == names and not any(converted(model))
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(call(model, photos(size)), expected)


def test_windows_stay_and_the_report_says_so():
    report = convert(made("timm HieraDet"))
    now = {block.index: block for block in report.blocks}
    assert [i for i, block in now.items() if block.converted] == [5, 7, 9]
    assert now[5].kept == ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    assert now[5].new and all(name.startswith("ripple.") for name in now[5].new)
    assert "windows of 8×8" in now[0].why
    lines = str(report).splitlines()
    assert len(lines) == len(now) and "new are feature_map, spatial_weights" in lines[5]


def test_attentions_of_unknown_classes_are_reported():
    report = convert(made("timm SigLIP"))
    (pool,) = [block for block in report.blocks if block.index is None]
    assert pool.name == "attn_pool" and "AttentionPoolLatent" in pool.why


def test_of_a_model_that_reads_too_only_what_sees_turns_into_ripples():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "intermediate_size": 64, "image_size": 96}
    text = {**small, "intermediate_size": 64, "vocab_size": 50, "projection_size": 32}
    model = transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config=vision)
    )
    report = convert(model)
    names = [block.name for block in report.blocks if block.converted]
    assert len(names) == 1 and names[0].startswith("vision_model.")
    assert "text" in report.blocks[0].why


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ([1], ["blocks.1.attn"]),
        ("all", ["blocks.0.attn", "blocks.1.attn"]),
        (lambda name, module: "0" in name, ["blocks.0.attn"]),
    ],
)
def test_blocks_are_chosen_by_number_by_function_or_all(blocks, names):
    model = made("timm class token")
    convert(model, blocks)
    assert [name for name, _ in converted(model)] == names


class Doubled(timm.layers.attention.Attention):
    """Somebody's own attention, which computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def with_own_class():
    model = vit()
    for block in model.blocks:
        block.attn.__class__ = Doubled
    return model


def with_more_weights():
    model = vit()
    model.blocks[1].attn.bonus = nn.Linear(64, 64)
    return model


def with_own_forward():
    model = vit()
    attention = model.blocks[1].attn
    attention.forward = lambda x, **rest: 2 * type(attention).forward(attention, x, **rest)
    return model


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (
            lambda: timm_model("samvit_base_patch16", depth=3, global_attn_indexes=(2,)),
            {},
            "rel_pos_h",
        ),
        (lambda: hf_sam(), {}, "rel_pos_h"),
        (lambda: MODELS["timm HieraDet"][0](), {"blocks": [0]}, "windows of 8×8"),
        (lambda: MODELS["timm HieraDet"][0](), {"blocks": "all"}, "windows of 8×8"),
        (lambda: vit(attn_drop_rate=0.1), {}, "attn_drop"),
        (lambda: vit(patch_drop_rate=0.5), {}, "patch_drop"),
        (lambda: vit(), {"blocks": [2]}, r"\[2\]"),
        (lambda: vit(), {"blocks": "some"}, "'some'"),
        (lambda: vit(), {"near": "hard"}, "hard"),
        (with_own_class, {}, "Doubled.*Attention"),
        (with_own_forward, {}, r"blocks\.1\.attn.*forward has been replaced"),
        (with_more_weights, {}, "weights bonus"),
        (lambda: timm_model("vit_pwee_patch16_reg1_gap_256", depth=1), {}, "ParallelScalingBlock"),
        (lambda: timm_model("pit_ti_224"), {}, "num_prefix_tokens"),
        (
            lambda: hf(transformers.Siglip2VisionModel, transformers.Siglip2VisionConfig),
            {},
            "Siglip2Attention",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 2, 2)), {}, "timm.layers.attention.Attention"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_and_nothing_changes(model, options, named):
    model = model()
    before = [*model.state_dict()]
    with pytest.raises(ValueError, match=f"(?s){named}"):
        convert(model, **options)
    assert [*model.state_dict()] == before and not any(converted(model))


def test_masks_are_refused_at_the_call():
    model = made("timm class token")
    convert(model)
    with pytest.raises(ValueError, match="attn_mask"):
        model(photos(TALL), attn_mask=torch.zeros(37, 37))


def test_a_converted_model_is_not_converted_again():
    model = made("timm class token")
    convert(model, [0])
    with pytest.raises(ValueError, match="revert"):
        convert(model, [1])


@pytest.mark.parametrize("partition", ["logarithmic", (0, 2, 5), foveal(2, tile=2, rings=1)])
def test_a_saved_model_is_restored_by_its_config(tmp_path, partition):
    from safetensors.torch import load_file, save_file

    model = made("timm class and registers")
    report = convert(model, [1], max_distance=2, partition=partition)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = json.loads(json.dumps(report.config))
    fresh = MODELS["timm class and registers"][0]().eval()
    assert convert(fresh, **config).config == report.config
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(call(fresh, photos(WIDE)), call(model, photos(WIDE)))


@pytest.mark.parametrize("name", ["transformers Dinov2", "transformers SAM 2"])
def test_transformers_save_and_load_converted_models(tmp_path, name):
    from ripple_attention.convert.transformers import from_pretrained

    model = made(name)
    convert(model, max_distance=2)
    model.save_pretrained(tmp_path)
    size = MODELS[name][1][1]
    again = from_pretrained(type(model), tmp_path)
    assert type(again) is type(model)
    assert torch.equal(call(again, photos(size)), call(model, photos(size)))


@pytest.mark.parametrize("options", [{"near": "features"}, {"weights": "truncated"}])
def test_other_kinds_of_ripples_convert_as_well(options):
    model = made("timm class and registers")
    expected = call(model, photos(WIDE))
    report = convert(model, max_distance=2, **options)
    assert report.config.items() >= options.items()
    assert 1e-4 < error(call(model, photos(WIDE)), expected) < 2


def test_a_deep_copy_has_a_grid_of_its_own():
    model = made("timm class token")
    convert(model)
    other = copy.deepcopy(model)
    expected = call(model, photos(WIDE))
    call(other, photos(TALL))
    assert model.blocks[0].attn.grid_size == (4, 8) and other.blocks[1].attn.grid_size == (6, 6)
    assert torch.equal(call(other, photos(WIDE)), expected)


def test_a_model_is_pickled_with_its_ripples(tmp_path):
    model = made("timm DINOv3")
    convert(model, max_distance=2)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(call(again, photos(WIDE)), call(model, photos(WIDE)))


@pytest.mark.parametrize("name", ["timm EVA-02", "transformers DINOv3", "torchvision"])
def test_ripples_have_the_precision_of_the_model(name):
    size, whole, half = MODELS[name][1][1], made(name), made(name).bfloat16()
    expected = call(half, photos(size).bfloat16())
    softmax = error(expected, call(whole, photos(size)))
    convert(half, max_distance=EVERYWHERE)
    out = call(half, photos(size).bfloat16())
    assert out.dtype == torch.bfloat16 and error(out, expected) < 3 * softmax


def test_every_new_parameter_learns():
    model = made("timm DINOv3").train()
    report = convert(model, max_distance=2)
    for _, attention in converted(model):  # they start at 0, where the ones behind learn nothing
        nn.init.normal_(attention.ripple.spatial_weights.embedding)
        nn.init.normal_(attention.ripple.far_scale.weight)
    features(model, photos(WIDE)).square().sum().backward()
    for block in report.blocks:
        attention = model.get_submodule(block.name)
        for name in (*block.new, "qkv.weight"):
            assert attention.get_parameter(name).grad.abs().sum() > 0, name


def gradients_in_a_rank(rank, port):
    """The gradients of one rank that saw half of the photos; those of one process for rank 0."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model = made("timm class and registers").train()
    convert(model, max_distance=2)
    model(photos(WIDE)).square().sum(1).mean().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(photos(WIDE)[rank : rank + 1]).square().sum(1).mean().backward()
    worst = max(error(p.grad, alone[name]) for name, p in model.named_parameters())
    torch.distributed.destroy_process_group()
    return worst


@pytest.mark.slow
def test_two_processes_train_a_converted_model_as_one_does():
    assert max(in_two_ranks(gradients_in_a_rank)) < 1e-4


def test_a_converted_model_compiles_whole_and_follows_the_size():
    model = made("timm class and registers")
    convert(model, max_distance=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (TALL, WIDE):
        assert error(call(compiled, photos(size)), call(model, photos(size))) < 1e-5


def test_a_converted_model_exports():
    model = made("timm class token")
    convert(model, max_distance=2)
    program = torch.export.export(
        model, (photos(TALL),), dynamic_shapes={"x": {0: torch.export.Dim("batch", max=8)}}
    )
    images = photos(TALL, batch=3)
    assert error(program.module()(images), call(model, images)) < 1e-5


def test_a_model_of_transformers_exports_with_the_mask_that_it_then_makes():
    model = made("transformers Dinov2")
    convert(model, max_distance=2)
    program = torch.export.export(model, (), {"pixel_values": photos(WIDE)})
    found = program.module()(pixel_values=photos(WIDE)).last_hidden_state
    assert error(found, call(model, photos(WIDE))) < 1e-5


class Odd(nn.Module):
    """Somebody's own attention, with names of its own."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


@adapts(Odd)
class RippleOdd(Adapter, Odd):
    uses = frozenset({"mix", "out"})

    @classmethod
    def heads(cls, attention, owners):
        return Heads(head_dim=8, num_heads=2)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(self.ripple(q, k, v, grid_size=self.grid_size).flatten(2))


class Tokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).mT


def test_an_adapter_of_a_dozen_lines_serves_any_other_attention():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 8, 8), Tokens(), Odd())
    expected = call(model, photos((32, 48)))
    convert(model, max_distance=EVERYWHERE)
    assert error(call(model, photos((32, 48))), expected) < 1e-4
