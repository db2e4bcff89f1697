"""Configuration of the documentation site, which ``make docs`` builds.

The site is built by Sphinx because it is maintained (mkdocs-material is declared inactive, its
successor Zensical is still at version 0.1), reports missing references as errors, and lets a
project render formulas itself, so that no page needs a script or a font from elsewhere.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "vlm-grpo"
author = "The vlm-grpo contributors"
release = version = installed_version("vlm-grpo")
language = "en"
smartquotes_action = "qe"  # two hyphens of an option in a quoted message stay two hyphens

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "offline",
    "reference_pages",
]
exclude_patterns = ["_extensions", "examples", "plots"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# A reference to the task interface must resolve. Other modules are not part of the reference, and
# the indexes of other libraries would have to be downloaded.
nitpicky = True
INTERFACE = "coordinates|drawing|errors|parsing|registry|scoring|task|types"
nitpick_ignore_regex = [(r"py:.*", rf"(?!vlm_grpo\.(?:{INTERFACE})\b).*")]

html_theme = "furo"
html_title = "vlm-grpo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
