"""Sphinx: `sphinx-build -W -b html docs docs/_build`, with cuflash importable."""

import cuflash

project = "cuflash"
author = "the cuflash authors"
project_copyright = f"2026, {author}"
version = release = cuflash.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
exclude_patterns = ["_build"]
html_theme = "alabaster"

autosummary_generate = False  # the functions stand on one page, docs/api.md
autodoc_typehints = "none"  # the docstrings say more: shapes and dtypes
numpydoc_show_class_members = False
