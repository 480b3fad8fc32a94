"""Sphinx makes a site of the Markdown of this repository: `make docs`, then open build/docs/docs/index.html."""

from importlib.metadata import version as installed

project = "tuneship"
version = release = installed("tuneship")
extensions = ["myst_parser"]
# The root is the repository, so that links work as they stand in the files.
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/**/*.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", ".venv", "build", "node_modules"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Excerpts of logs and of dialects that no highlighter knows are plain text; a wrong name of a file is an error.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "sphinx_rtd_theme"
html_title = f"tuneship {version}"
html_show_copyright = False
html_copy_source = False
html_show_sphinx = False
