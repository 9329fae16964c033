"""How the documentation becomes a site: `make docs` writes it to build/docs, one folder that opens offline."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from offramp import __version__  # noqa: E402

project = "offramp"
author = "The offramp authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "site_pages"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
smartquotes = False
default_role = "literal"  # a single backtick in a docstring is code, as in Markdown

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"offramp {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_search_summary = False  # summaries are fetched, and a page from file:// may fetch nothing
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b58", "color-brand-content": "#0b6b58"},
    "dark_css_variables": {"color-brand-primary": "#5ec8ae", "color-brand-content": "#5ec8ae"},
}
