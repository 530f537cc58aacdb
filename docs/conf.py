"""How the site is built: ``make docs``, which takes every warning for an error."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from lightning_pipe import __version__

ROOT = Path(__file__).resolve().parent.parent

project = "lightning-pipe"
author = "the authors of lightning-pipe"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb"]

# Headings have anchors as on GitHub: page.md#the-heading.
myst_heading_anchors = 3

# Of the methods inherited from Lightning and PyTorch, only those with a docstring in this project are shown.
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
nitpicky = True

html_theme = "furo"
html_title = f"lightning-pipe {release}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

# Files that lie elsewhere in the repository, and are pages of the site.
ELSEWHERE = {"changelog": "CHANGELOG.md"} | {
    f"examples/{readme.parent.name}": f"examples/{readme.parent.name}/README.md"
    for readme in sorted(ROOT.glob("examples/*/README.md"))
}
# The rooms that export names.
ROOMS = ("callbacks", "engine", "loops", "pipe", "recsys", "strategies")


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_as_on_a_forge)
    app.connect("missing-reference", link_by_public_name)
    app.connect("warn-missing-reference", is_forgiven)
    app.connect("autodoc-process-bases", show_public_bases)


def read_as_on_a_forge(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the files from elsewhere in their pages' places, and point links between files to pages."""
    here = ROOT / "docs" / f"{docname}.md"
    file = ROOT / ELSEWHERE.get(docname, f"docs/{docname}.md")
    pages = {ROOT / path: ROOT / "docs" / f"{page}.md" for page, path in ELSEWHERE.items()}
    pages[ROOT / "README.md"] = ROOT / "docs/index.md"

    def moved(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / link[1]))
        return f"]({os.path.relpath(pages.get(target, target), here.parent)}{link[2] or ''})"

    text = file.read_text(encoding="utf-8") if docname in ELSEWHERE else source[0]
    if docname == "notebook":
        text = "".join(map(as_markdown, json.loads(here.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]))
        text += "\n[Download it](notebook.ipynb), and run it yourself.\n"
    # With a width, a picture is a link to itself in full size.
    text = re.sub(r"^!\[([^\]]*)\]\((\S+)\)$", r"```{image} \2\n:alt: \1\n:width: 100%\n```", text, flags=re.MULTILINE)
    source[0] = re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", moved, text)


def as_markdown(cell: dict[str, Any]) -> str:
    """A cell of the notebook, with what it printed and drew when it was last run."""
    code = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return f"{code}\n\n"
    parts = [f"```python\n{code}\n```\n\n"]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```\n\n")
        else:
            parts.append(
                f'<img alt="what the cell draws" src="data:image/png;base64,{output["data"]["image/png"].strip()}">\n\n'
            )
    return "".join(parts)


def link_by_public_name(app: Sphinx, env: Any, node: Any, content: Any) -> nodes.Node | None:
    """A docstring names a function by the module it is in; the reference has it under the room that exports it."""
    target = node.get("reftarget", "")
    for room in ROOMS:
        public = f"lightning_pipe.{room}.{target.rpartition('.')[2]}"
        if not target.startswith(f"lightning_pipe.{room}.") or public not in env.domaindata["py"]["objects"]:
            continue
        found = getattr(importlib.import_module(f"lightning_pipe.{room}"), public.rpartition(".")[2])
        if f"{found.__module__}.{found.__qualname__}" == target:
            return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)
    return None


def show_public_bases(app: Sphinx, name: str, shown: type, options: Any, bases: list[Any]) -> None:
    """Show the bases of a base class that only this project uses, in its place."""

    def public(base: Any) -> list[Any]:
        module = getattr(base, "__module__", "")
        rooms = [importlib.import_module(f"lightning_pipe.{room}") for room in ROOMS]
        if not module.startswith("lightning_pipe.") or any(
            getattr(room, base.__name__, None) is base for room in rooms
        ):
            return [] if base is object else [base]
        return [one for other in base.__bases__ for one in public(other)]

    bases[:] = [one for base in bases for one in public(base)] or [object]


def is_forgiven(app: Sphinx, domain: Any, node: Any) -> bool | None:
    """A name of this project that leads nowhere is an error, but for types, which link where they can.

    Others' names have no pages here, and the build has no network to look for theirs.
    """
    if node.get("refdomain") != "py":
        return None
    is_type = "refexplicit" not in node or node.get("refspecific")
    return is_type or not node["reftarget"].startswith("lightning_pipe.") or None
