"""Sphinx configuration, used by docs/build. The source folder is the repository's root."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpipe  # noqa: E402
from expand import ROOT, cpp_reference, python_reference, side_by_side, web_only  # noqa: E402

project = "gpipe"
author = "the gpipe authors"
project_copyright = ""
version = release = gpipe.__version__

extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "bench/README.md", "examples/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["build", ".*", "**/.*"]
nitpicky = True
nitpick_ignore_regex = [
    (r"cpp:.*", r".*"),  # names of LibTorch and the standard library have no page here
    (r"py:.*", r"(torch|nn|collections|contextlib|datetime|typing|os|pathlib|gpipe\.core)\..*"),
    (r"py:class", r"gpipe\.(skip\.M|Namespace|Pipeline|StepOptions|SkipKey|Graph|planning\.Plan|\w+\._Result)"),
    (r"py:class", r"Optimizer|GradScaler|How the pipeline.*"),  # annotations without a module; a docstring with a colon
]
suppress_warnings = ["ref.ref", "ref.python"]  # names in headers that no page shows; `bytes` has several meanings
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"gpipe {release}"
html_static_path = ["style.css", "../figures/web/schedules.html"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of nn.Module
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

PUBLIC = {"Timeline": "gpipe"} | dict.fromkeys(
    "Profile LayerProfile SkipProfile TieProfile Prediction Plan Plans".split(), "gpipe.balance"
)

breathe_projects = {"gpipe": str(ROOT / "build/docs/doxygen/xml")}
breathe_default_project = "gpipe"
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False
cpp_maximum_signature_line_length = 100


def _show_examples(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes code blocks of the indented lines before the sections of a docstring."""
    result: list[str] = []
    in_code = False
    for index, line in enumerate(lines):
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            result += lines[index:]
            break
        if line.startswith("    ") and not in_code and (not result or not result[-1]):
            result += [".. code-block:: python", ""]
            in_code = True
        elif line and not line.startswith(" "):
            in_code = False
        result.append(line)
    lines[:] = result


def _name_publicly(app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Replaces names of private modules by the package's public names."""
    public = [
        text and re.sub(r"\bgpipe\._C\.(\w+)", lambda found: f"{PUBLIC.get(found[1], 'gpipe')}.{found[1]}", text)
        for text in (signature, returns)
    ]
    public = [text and text.replace("<factory>", "...") for text in public]  # a dataclass default
    return tuple(text and re.sub(r"\(self: [\w.]+(, )?", "(", text) for text in public)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _show_examples, priority=400)  # runs before napoleon
    app.connect("autodoc-process-signature", _name_publicly)
    for change in (web_only, side_by_side, python_reference, cpp_reference):
        app.connect("source-read", change)
