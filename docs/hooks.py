"""Hooks of the docs site: files outside docs/ that pages link to become part of the site.

Pages link to such files by relative paths, so that the links work on a checkout too. A link to a
directory becomes plain text, since a site has no directory listings.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?P<label>\[[^\]\n]*\])\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def target_of(source: File, path: str) -> Path:
    """Return the file that a page's link names."""
    assert source.abs_src_path is not None
    return (Path(source.abs_src_path).parent / path).resolve()


def place_of(target: Path) -> str:
    """Return the path of a file in the site's sources."""
    return target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog, the rules of contributing, and every linked file outside docs/."""
    waiting = list(files.documentation_pages())
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        waiting.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
        files.append(waiting[-1])
    while waiting:
        page = waiting.pop()
        for link in LINK.finditer(page.content_string):
            target = target_of(page, link["path"])
            outside = target.is_file() and not target.is_relative_to(DOCS)
            if outside and files.get_file_from_path(place_of(target)) is None:
                added = File.generated(config, place_of(target), abs_src_path=str(target))
                files.append(added)
                if added.is_documentation_page():
                    waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the places that `on_files` chose."""
    here = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = target_of(page.file, link["path"])
        if target.is_dir():
            return link["label"][1:-1]
        if not target.is_file():
            return link[0]  # mkdocs reports it
        path = os.path.relpath(place_of(target), here or ".")
        return f"{link['label']}({path}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)
