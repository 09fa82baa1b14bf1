"""Sphinx configuration, used by docs/build. The source folder is the repository's root."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gpipe

ROOT = Path(__file__).resolve().parents[2]

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
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["docs/**.md", "docs/*.ipynb", "README.md", "bench/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["build", ".*", "**/.*"]
nitpicky = True
nitpick_ignore_regex = [
    (r"cpp:.*", r".*"),  # names of LibTorch and the standard library have no page here
    (r"py:.*", r"(torch|nn|collections|typing|os|pathlib)\..*"),
    (r"py:class", r"gpipe\.skip\.M"),
]
suppress_warnings = ["ref.ref"]  # names in headers that no page shows
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Pages

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"gpipe {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# The Python reference

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of nn.Module
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

MEASURED = ("Profile", "LayerProfile", "SkipProfile", "TieProfile", "Prediction", "Suggestion", "Candidate")
MEASURED += ("Cluster", "ClusterPlan")
PUBLIC = {"Timeline": "gpipe", "NativeLayer": "gpipe.models", **dict.fromkeys(MEASURED, "gpipe.balance")}

# The C++ reference

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
        text and re.sub(r"\bgpipe\._C\.(\w+)", lambda found: f"{PUBLIC[found[1]]}.{found[1]}", text)
        for text in (signature, returns)
    ]
    public = [text and re.sub(r"\bgpipe\.skip\.[a-z]\w*\.(?=[A-Z])", "gpipe.skip.", text) for text in public]
    public = [text and text.replace("<factory>", "...") for text in public]  # a dataclass default
    return tuple(text and re.sub(r"\(self: [\w.]+(, )?", "(", text) for text in public)


def _text_of_notebook(app: Any, docname: str, source: list[str]) -> None:
    """Makes Markdown of a notebook: its texts, its code, and the stored outputs, drawings as HTML."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    parts: list[str] = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/svg+xml" in data:
                parts.append("```{raw} html\n" + "".join(data["image/svg+xml"]) + "\n```")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip("\n") + "\n```")
    source[0] = "\n\n".join(parts) + "\n"


def _set_side_by_side(app: Any, docname: str, source: list[str]) -> None:
    """Makes tabs of a Python block that is followed by a C++ block."""
    tab = "::::{{tab-item}} {0}\n:sync: {0}\n{1}\n::::\n"

    def tabs(found: re.Match[str]) -> str:
        python, cpp = found[1], found[2]
        return (
            ":::::{tab-set}\n:sync-group: language\n\n"
            + tab.format("Python", python)
            + "\n"
            + tab.format("C++", cpp)
            + ":::::\n"
        )

    block = r"```{}\n(?:(?!```).*\n)*```"
    pair = re.compile(rf"^({block.format('python')})\n+({block.format(re.escape('c++'))})$", re.MULTILINE)
    source[0] = pair.sub(tabs, source[0])


def _start_at_index(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>gpipe</title>\n'
        (Path(app.outdir) / "index.html").write_text(page + '<a href="docs/index.html">gpipe</a>\n')


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _show_examples, priority=400)  # runs before napoleon
    app.connect("autodoc-process-signature", _name_publicly)
    app.connect("source-read", _text_of_notebook)
    app.connect("source-read", _set_side_by_side)
    app.connect("build-finished", _start_at_index)
