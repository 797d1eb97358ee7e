"""Configuration of the documentation: ``make docs`` builds it, and needs no network."""

import os
import sys
from pathlib import Path
from typing import Any

import myst_nb.core.render

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import adapt_links, generate_pages  # noqa: E402

import corn  # noqa: E402

project = "CorN"
author = copyright = "the CorN authors"  # noqa: A001
release = version = corn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "**/out"]
# Formulas are in Unicode, and blocks without a language are outputs and formulas.
highlight_language = "none"
default_role = "code"
smartquotes = False  # they would turn the dashes of options into one long dash

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

# Tutorials run while the documentation is built: an error in a cell is an error of the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
# Their commands are those of this environment, with one thread each.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TTY_COMPATIBLE"] = "0"  # no progress bars in the pages

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"CorN {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#005a8c"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

merge_streams = myst_nb.core.render.coalesce_streams


def join_chunks(outputs: list[Any]) -> list[Any]:
    """Join the chunks of each stream before myst_nb merges them."""
    joined: dict[object, Any] = {}
    for place, output in enumerate(outputs):
        stream = output.get("name") if output["output_type"] == "stream" else place
        if stream in joined:
            joined[stream]["text"] += output["text"]
        else:
            joined[stream] = output.copy()
    return merge_streams(list(joined.values()))


def setup(app: object) -> None:
    """Generate pages, and make links to files outside of ``docs`` work."""
    generate_pages()
    # Commands send their output in chunks of 100 bytes, and myst_nb ends a line after each.
    myst_nb.core.render.coalesce_streams = join_chunks
    app.connect("source-read", adapt_links)  # type: ignore[attr-defined]
