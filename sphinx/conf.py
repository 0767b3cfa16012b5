"""Sphinx's settings. `make docs` builds the pages; a warning fails the build."""

import os

import hydrax

project = "Hydrax"
author = "The Hydrax developers"
copyright = author
version = release = hydrax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# One page describes a loader whose package is too large to install for that.
autodoc_mock_imports = ["tensorflow"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]

# Links into other projects need their inventories from the network; a build must not.
intersphinx_mapping = {}
if os.environ.get("READTHEDOCS"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
    }

html_theme = "furo"
html_title = f"Hydrax {release}"
html_show_sourcelink = False
