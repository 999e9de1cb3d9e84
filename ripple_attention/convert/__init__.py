"""Turns a pretrained vision transformer into ripples, in place, and keeps what it knows.

    from ripple_attention.convert import convert, revert

    report = convert(model, near="softmax", max_distance=8)
    print(report)

`qkv`, `proj`, norms of queries and keys, rotations and layer scale stay, as the same parameters
under the same names; only what mixes the tokens is new.
"""

from ripple_attention.convert.adapter import Adapter, Grid, Heads, adapts, known_attentions
from ripple_attention.convert.conversion import convert, converted, revert
from ripple_attention.convert.report import Block, Report

__all__ = [
    "Adapter",
    "Block",
    "Grid",
    "Heads",
    "Report",
    "adapts",
    "convert",
    "converted",
    "known_attentions",
    "revert",
]
