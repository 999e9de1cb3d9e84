"""What the networks of recipes are made of: counted once, and kept in a result file.

    python -m ripple_lab.reproduce.networks

builds the network of every recipe of the tables, on the meta device, and writes `networks.csv`.
Tables read that file, so that they need neither PyTorch nor timm.
"""

from typing import Any

from ripple_lab.files import write_csv
from ripple_lab.recipes import find_recipe
from ripple_lab.results import Row, results_folder

FILE = "networks.csv"


def count(recipe: Any) -> Row:
    """Millions of parameters, billions of a detector's multiply-adds, and how attention runs.

    Only parameters that are trained count; `phi_and_p` is how many of them are feature maps and
    the matrices P. The feature map and ε are those of the layers that were built.
    """
    import torch

    from ripple_attention.feature_maps import FEATURE_MAPS
    from ripple_attention.modules import LinearAttention
    from ripple_lab.bench.cost import multiply_adds

    with torch.device("meta"):
        gflops = None
        model = recipe.without_start().create_model()
        if recipe.task == "detection":
            gflops = round(multiply_adds(model, (3, 800, 1066)) / 1e9, 3)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    parts = (".feature_map.", ".spatial_weights.proj.")
    of_parts = sum(size for name, size in trained.items() if any(part in name for part in parts))
    row = {"recipe": recipe.name, "millions": sum(trained.values()) / 1e6}
    row |= {"phi_and_p": of_parts / 1e6, "gflops": gflops}
    row |= dict.fromkeys(("feature_map", "features", "scaling", "eps"))
    for layer in model.modules():
        if isinstance(layer, LinearAttention):
            phi = layer.feature_map
            names = [name for name, kind in FEATURE_MAPS.items() if kind is type(phi)]
            row |= {"feature_map": names[-1], "features": phi.num_features}
            row |= {"scaling": phi.scaling, "eps": layer.eps}
            break
    return row


if __name__ == "__main__":
    from ripple_lab.reproduce.tables import TABLES

    names = dict.fromkeys(row.recipe for table in TABLES for row in table.rows if row.recipe)
    write_csv([count(find_recipe(name)) for name in names], results_folder() / FILE)
