"""Formulas as MathML, which browsers draw by themselves: no script is loaded."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

SYNONYMS = {r"\lt": "<", r"\dots": r"\ldots"}  # the first are not known to docutils


def convert(formula: str, block: bool) -> str:
    """LaTeX as MathML; what cannot be converted stops the build."""
    for known, other in SYNONYMS.items():
        formula = formula.replace(known, other)
    try:
        return latex2mathml.tex2mathml(formula, as_block=block)
    except MathError as error:
        raise ExtensionError(f"this formula is not understood: {formula}: {error}") from error


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(convert(node.astext(), block=False))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{convert(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
