"""Explanations: coefficients are those of the layer, figures and profiles those of the model."""

import csv
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
import typer
from PIL import Image
from small_run import enliven, write_small_run
from torch import nn
from typer.testing import CliRunner

from ripple_attention import (
    LinearAttention,
    Partition,
    RippleAttention,
    chebyshev,
    logarithmic,
    record_spatial_weights,
)
from ripple_attention.models.vit import ATTENTIONS, GridVisionTransformer
from ripple_lab.commands import inspection
from ripple_lab.data.digits import load_digits_images
from ripple_lab.inspection.analyze import (
    draw_divergence,
    draw_weights,
    pictures_of_folder,
    profile,
    strength_rows,
    weight_rows,
)
from ripple_lab.inspection.explain import Explainer
from ripple_lab.inspection.figure import explain_figure, write_explanation
from ripple_lab.inspection.views import Settings, record_attention, shares, weights_of
from ripple_lab.plots import plt, save
from ripple_lab.train.evaluate import Predictor

GRIDS = [(1, 1), (1, 7), (7, 5), (4, 9)]
KINDS = ["stick-breaking", "truncated", "softmax", "fixed"]


def lively(**options):
    torch.manual_seed(3)
    layer = RippleAttention(24, num_heads=3, halt_threshold=0.05, **options).eval()
    enliven(layer)
    return layer


def before_projection(layer, x, **kwargs):
    """What the layer hands to its last projection (B, H, W, N, E), without any recording."""
    seen = []
    handle = layer.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        layer(x, **kwargs)
    handle.remove()
    return seen[0].unflatten(-1, (layer.num_heads, layer.head_dim))


def summed(view, row, column):
    return torch.einsum("bnhw,bhwne->bne", view.coefficients(row, column), view.v)


def look(model, x, settings=None, **kwargs):
    with torch.no_grad(), record_attention(model, *([settings] if settings else [])) as views:
        model(x, **kwargs)
    return list(views.values())


def assert_exact(view, output):
    H, W = view.grid_size
    for row in range(H):
        for column in range(W):
            expected = output[:, row, column]
            torch.testing.assert_close(summed(view, row, column), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_times_values_are_the_ripple_layers_output(grid, kind):
    layer = lively(weights=kind, max_distance=3)
    x = torch.randn(2, *grid, 24)
    (view,) = look(layer, x)
    assert_exact(view, before_projection(layer, x))


@pytest.mark.parametrize("partition", [logarithmic(5), Partition((1, 2)), chebyshev(12)])
@pytest.mark.parametrize("tail", ["share", "printed"])
def test_coefficients_hold_for_any_partition_and_tail(partition, tail):
    layer = lively(partition=partition, tail=tail, eps=0.0)
    x = torch.randn(1, 6, 9, 24)
    (view,) = look(layer, x)
    assert int((view.halted < partition.num_groups).sum()) > 0
    assert_exact(view, before_projection(layer, x))


def test_coefficients_without_eps_add_up_to_one():
    (view,) = look(lively(eps=0.0, feature_map="elu"), torch.randn(1, 5, 7, 24))
    torch.testing.assert_close(view.coefficients(2, 3).sum((-2, -1)), torch.ones(1, 3))
    torch.testing.assert_close(shares(view.coefficients(0, 6)).sum((-2, -1)), torch.ones(1, 3))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_coefficients_are_exact_in_every_kind_of_model(attention):
    torch.manual_seed(0)
    model = GridVisionTransformer(
        attention=attention, img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2,
        ripple_layers=1, num_classes=4,
    ).eval()  # fmt: skip
    views = look(model, torch.randn(1, 3, 24, 40))
    assert [view.name for view in views] == ["blocks.0.attn", "blocks.1.attn"]
    for view in views:
        assert view.grid_size == (3, 5)
        assert_exact(view, view.output)


def test_padded_keys_have_no_coefficient():
    layer, x = lively(), torch.randn(1, 5, 6, 24)
    mask = torch.zeros(1, 5, 6, dtype=torch.bool)
    mask[:, :, 4:] = True
    (view,) = look(layer, x, key_padding_mask=mask)
    assert view.coefficients(1, 1)[..., 4:].eq(0).all()
    assert_exact(view, before_projection(layer, x, key_padding_mask=mask))


def test_linear_coefficients_are_those_of_linear_attention():
    layer, x = lively(), torch.randn(1, 5, 6, 24)
    linear = LinearAttention(24, 3)
    linear.load_state_dict(layer.state_dict(), strict=False)
    expected = before_projection(linear.eval(), x)
    (view,) = look(layer, x)
    found = torch.einsum("bnhw,bhwne->bne", view.linear_coefficients(3, 1), view.v)
    torch.testing.assert_close(found, expected[:, 3, 1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, summed(view, 3, 1), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["share", "printed"])
def test_weights_as_trained_are_those_of_the_layer(kind, tail):
    layer, x = lively(weights=kind, tail=tail), torch.randn(2, 4, 5, 24)
    with torch.no_grad(), record_spatial_weights(layer) as recorded:
        layer(x)
    (view,) = look(layer, x)
    torch.testing.assert_close(view.weights, recorded["spatial_weights"], atol=1e-6, rtol=1e-6)
    sticks = kind in ("stick-breaking", "truncated")
    assert bool((view.halted < 5).any()) == sticks


def test_a_smaller_distance_keeps_near_rings_and_gives_the_rest_what_is_left():
    layer, x = lively(max_distance=4), torch.randn(1, 6, 6, 24)
    layer.spatial_weights.halt_threshold = 0.0
    (trained,), (cut,) = look(layer, x), look(layer, x, Settings(max_distance=2))
    assert cut.partition == chebyshev(2)
    torch.testing.assert_close(cut.weights[..., :2], trained.weights[..., :2])
    torch.testing.assert_close(cut.weights[..., 2], trained.weights[..., 2:].sum(-1))
    assert_exact(cut, cut.output)
    assert not torch.allclose(cut.output, trained.output, atol=1e-3)


def test_another_threshold_halts_elsewhere():
    layer, x = lively(), torch.randn(1, 6, 6, 24)
    (never,) = look(layer, x, Settings(halt_threshold=0.0))
    (early,) = look(layer, x, Settings(halt_threshold=0.4))
    assert never.halted.eq(5).all()
    sticks = never.weights.flatten(0, 3).tolist()
    expected = [next((g for g in range(5) if 1 - sum(w[:g]) < 0.4), 5) for w in sticks]
    assert early.halted.flatten().tolist() == expected
    assert len(set(expected)) > 2
    assert_exact(early, early.output)


def test_recording_leaves_the_model_as_it_was():
    layer, x = lively(), torch.randn(1, 4, 4, 24)
    layer.fuse = False
    names = set(vars(layer))
    expected = layer(x)
    with record_attention(layer) as views:
        assert torch.equal(layer(x), expected)
    assert set(views) == {""}
    with pytest.raises(ValueError, match="takes floating-point x"), record_attention(layer):
        layer(x[..., :5])
    assert set(vars(layer)) == names
    assert torch.equal(layer(x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", [RippleAttention, LinearAttention])
def test_fused_kernels_stand_aside_while_looked_at(kind):
    torch.manual_seed(0)
    layer, x = kind(96, num_heads=3).cuda().eval(), torch.randn(1, 9, 7, 96, device="cuda")
    (view,) = look(layer, x)
    expected = before_projection(layer, x)[:, 8, 2]  # by the kernels
    torch.testing.assert_close(summed(view, 8, 2), expected, atol=2e-3, rtol=2e-3)


def test_what_cannot_be_looked_at_is_refused():
    with pytest.raises(ValueError, match="no RippleAttention"), record_attention(nn.Linear(2, 2)):
        pass
    (view,) = look(lively(), torch.randn(1, 4, 6, 24))
    for row, column in ((4, 0), (0, 6), (-1, 0)):
        with pytest.raises(ValueError, match="rows 0 to 3 and columns 0 to 5"):
            view.coefficients(row, column)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def explainer(run):
    return Explainer.from_checkpoint(run)


@pytest.fixture(scope="module")
def digit():
    return load_digits_images(train=False)[5][0]


def test_explanations_predict_as_the_predictor_does(run, explainer, digit):
    explanation = explainer(digit)
    for (name, p), (label, q) in zip(
        explanation.classes, Predictor(run / "model.safetensors")(digit), strict=True
    ):
        assert name == label
        assert p == pytest.approx(q, abs=1e-6)
    assert explanation.picture.shape == (3, 32, 32)
    seen = torch.from_numpy(np.array(digit)).permute(2, 0, 1) / 255
    torch.testing.assert_close(explanation.picture, seen, atol=1e-5, rtol=0)
    assert [view.kind for view in explanation.layers] == ["ripple", "ripple", "linear"]


def test_distances_beyond_the_trained_are_refused(explainer, digit):
    assert explainer.max_distance == 4
    with pytest.raises(ValueError, match="1 to 4.*got 5"):
        explainer(digit, Settings(max_distance=5))


def test_figures_are_written_and_depend_on_the_patch(explainer, digit, tmp_path):
    explanation = explainer(digit)
    for name, at in (("a.png", (0, 3)), ("b.png", (3, 0)), ("c.svg", (3, 0))):
        write_explanation(explanation, at, tmp_path / name)
    a, b = (Image.open(tmp_path / name) for name in ("a.png", "b.png"))
    assert min(a.size) > 500
    assert a.tobytes() != b.tobytes()
    assert ET.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        write_explanation(explanation, (0, 0), tmp_path / "d.gif")


@pytest.mark.parametrize("name", ["ripple_tiny4_patch2_32", "deit6_tiny_patch2_32"])
def test_models_of_timm_are_explained_on_grids_that_are_not_square(name, tmp_path):
    model = timm.create_model(name, patch_size=8, embed_dim=24, num_heads=2, depth=2)
    explanation = Explainer.from_model(model)(torch.rand(3, 16, 40))
    assert explanation.grid_size == (2, 5)
    assert explanation.classes[0][0].startswith("class ")
    write_explanation(explanation, (1, 4), tmp_path / "wide.png")
    assert (tmp_path / "wide.png").stat().st_size > 1000


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["ripple", "linear"])
def test_strength_is_what_coefficients_add_up_to(kind, masked):
    layer = lively(eps=3.0) if kind == "ripple" else LinearAttention(24, num_heads=3, eps=3.0)
    mask = torch.rand(2, 4, 5) < 0.4 if masked else None
    (view,) = look(layer, torch.randn(2, 4, 5, 24), key_padding_mask=mask)
    strength = view.strength()
    assert 0.02 < strength.mean() < 0.98
    for row, column in ((0, 0), (3, 4), (1, 2)):
        total = view.coefficients(row, column).sum((-2, -1))
        torch.testing.assert_close(strength[:, row, column], total)


def test_profiles_are_means_over_all_images(explainer):
    images = torch.rand(5, 3, 32, 32)
    _, views = explainer.record(images)
    profiles = profile(explainer, list(images), batch_size=2)
    assert [it.name for it in profiles] == ["blocks.0.attn", "blocks.1.attn"]
    for it, view in zip(profiles, views, strict=False):
        torch.testing.assert_close(it.weights.float(), view.weights.mean((0, 1, 2)))
        flat = view.weights.double().flatten(0, 2)
        torch.testing.assert_close(it.deviations, flat.std(0, correction=0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(it.halted.permute(1, 2, 0), view.halted.double().mean(0))
        torch.testing.assert_close(it.shares.sum(-1), torch.ones(2).double())
        assert it.images == 5
        strength = view.strength().double()
        torch.testing.assert_close(it.strength, strength.mean((0, 1, 2)))
        torch.testing.assert_close(it.weak, (strength < 0.5).double().mean((0, 1, 2)))
        features = view.layer.feature_map(view.q, view.k)
        active = [(x > 0).double().mean((0, 1, 2)) for x in features]
        torch.testing.assert_close(it.active, torch.stack(active), rtol=1e-5, atol=1e-6)
    assert profiles[0].rings == ["0", "1", "2", "3", "rest"]
    assert len(weight_rows(profiles)) == 2 * 2 * 5
    with pytest.raises(ValueError, match="got none"):
        profile(explainer, [])


def test_features_that_are_zero_for_all_keys_are_counted(explainer):
    images = [torch.rand(3, 32, 32) for _ in range(3)]
    feature_map = dict(explainer.model.named_modules())["blocks.0.attn.feature_map"]
    with torch.no_grad():
        feature_map.fc.bias[:] = 100
        feature_map.fc.bias[:3] = -100
    first, *_ = strength_rows(profile(explainer, images, batch_size=2))
    alive = 1 - 3 / feature_map.num_features
    assert float(first["dead_features"]) == pytest.approx(1 - alive, abs=1e-6)
    assert float(first["dead_features_of_all_heads"]) == pytest.approx(1 - alive, abs=1e-6)
    assert float(first["active_features_of_keys"]) == pytest.approx(alive, abs=1e-6)


def test_rings_of_other_partitions_have_their_distances(tmp_path):
    model = timm.create_model(
        "ripple_tiny4_patch2_32", patch_size=8, embed_dim=24, num_heads=2, depth=1,
        partition="logarithmic", max_distance=4,
    )  # fmt: skip
    (it,) = profile(Explainer.from_model(model), [torch.rand(3, 32, 32)])
    assert it.rings == ["0", "1", "2–3", "4–7", "rest"]


@pytest.mark.parametrize("draw", [draw_weights, draw_divergence])
def test_lines_and_dots_are_not_cut_off(explainer, draw):
    profiles = profile(explainer, list(torch.rand(3, 3, 32, 32)))
    profiles[0].divergence[:] = 0.0768  # as of a young run: close together, and far from 0
    profiles[1].divergence[:] = 0.0769
    profiles[1].weights[0, 2] = 0.9  # of a later panel: all have one scale
    figure = draw(profiles)
    for ax in figure.axes:
        least, most = ax.get_ylim()
        assert least == 0
        assert max(max(line.get_ydata()) for line in ax.lines) < 0.95 * most
    plt.close(figure)


def test_a_whole_explanation_fits_a_screen_and_its_words_do_not_cover_each_other(tmp_path):
    model = timm.create_model("ripple_tiny_patch16_224").eval()
    figure = explain_figure(Explainer.from_model(model)(torch.rand(3, 224, 224)), (7, 7))
    figure.canvas.draw()
    for ax in figure.axes:
        words = [text.get_window_extent() for text in ax.texts if "halt" in text.get_text()]
        assert not any(a.overlaps(b) for a, b in pairwise(words))
    save(figure, tmp_path / "explanation.png")
    width, height = Image.open(tmp_path / "explanation.png").size
    assert width <= 1920 and height <= 1080


def test_models_without_ripples_have_no_profile():
    model = timm.create_model("deit_la_tiny4_patch2_32", patch_size=8, embed_dim=24, num_heads=2)
    with pytest.raises(ValueError, match="no ripples to analyze"):
        profile(Explainer.from_model(model), [torch.rand(3, 32, 32)])


def command(*words):
    app = typer.Typer()
    for function in (inspection.explain, inspection.analyze):
        app.command()(function)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_explain_command(run, digit, tmp_path):
    picture, output = tmp_path / "digit.png", tmp_path / "new folder" / "out.svg"
    digit.save(picture)
    done = command("explain", run, picture, "--at", "1,2", "--output", output)
    assert done.exit_code == 0, done.exception
    assert "%" in done.output and output.stat().st_size > 1000
    for at, said in (("9,0", "rows 0 to 3"), ("1;2", "ROW,COL"), ("-1,2", "ROW,COL")):
        assert said in str(command("explain", run, picture, "--at", at).exception)
    assert ".png or .svg" in str(command("explain", run, picture, "--output", "a.txt").exception)


def test_analyze_command(run, digit, tmp_path):
    done = command("analyze", run, "--output", tmp_path / "all", "--count", 6)
    assert done.exit_code == 0, done.exception
    parts = ("weights", "halting", "divergence", "strength")
    names = {f"{part}.{suffix}" for part in parts for suffix in ("csv", "png", "svg")}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    rows = list(csv.DictReader((tmp_path / "all" / "weights.csv").open()))
    assert rows[0].keys() == {"layer", "name", "head", "images", "ring", "mean", "deviation"}
    first = [float(row["mean"]) for row in rows if row["layer"] == row["head"] == "1"]
    assert sum(first) == pytest.approx(1, abs=1e-5)
    assert rows[0]["images"] == "6"


def test_pictures_of_a_folder(digit, tmp_path):
    with pytest.raises(ValueError, match="there must be pictures"):
        pictures_of_folder(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("not a picture")
    for name in "bac":
        digit.resize((ord(name), 8)).save(tmp_path / f"{name}.png")
    assert [image.width for image in pictures_of_folder(tmp_path, 2)] == [97, 98]


def test_weights_of_takes_a_layers_own_values():
    layer, v = lively(), torch.randn(1, 3, 3, 3, 8)
    with torch.no_grad():
        weights, _, partition = weights_of(layer, v)
        torch.testing.assert_close(weights, layer.spatial_weights(v))
    assert partition == layer.partition
