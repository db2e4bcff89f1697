"""Fail the build if a page loads a script, a style, an image or a font from another host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["'](?:https?:)?//"""
    r"""|<link(?![^>]*rel=["']canonical)[^>]*\shref=["'](?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)


def check_pages(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    files = [*Path(app.outdir).rglob("*.html"), *Path(app.outdir).rglob("*.css")]
    found = [
        f"{file.relative_to(app.outdir)}: {match[0]}"
        for file in files
        for match in _LOADED.finditer(file.read_text("utf-8"))
    ]
    if found:
        raise ExtensionError("pages load files from other hosts:\n" + "\n".join(found))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", check_pages)
    return {"parallel_read_safe": True}
