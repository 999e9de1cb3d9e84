"""The documentation site: `make docs` builds it, without warnings, into build/docs."""

import sys
from pathlib import Path

import ripple_attention

sys.path.insert(0, str(Path(__file__).parent))  # for `mathml`

project = "ripple-attention"
author = "The ripple-attention authors"
version = release = ripple_attention.__version__

extensions = ["mathml", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["images", "static"]

html_theme = "furo"
html_title = "ripple-attention"
html_math_renderer = "mathml"
html_show_sphinx = html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["style.css"]

# Docstrings name code in `single quotes`, and types in the signature alone.
default_role = "code"
napoleon_use_rtype = False  # what is returned is told in words
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "no-value": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 70  # longer ones get a line for each parameter
add_module_names = False

# Every name that a signature mentions is in the reference, except those of other packages (this
# site loads nothing from elsewhere, not even their lists of names) and of what only kernels use.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!ripple_attention).*|ripple_attention\.fusion\..*")]
