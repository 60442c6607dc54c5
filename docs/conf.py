"""Sphinx settings of the documentation site; `make docs` builds it.

The pages need no other server: furo uses the fonts of the system, and nothing comes from a CDN.
"""

import preblock

project = "Preblock"
author = "The Preblock authors"
copyright = author
release = preblock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Preblock {release}"
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# GitHub makes an anchor of each heading; the links of the documents use them.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
