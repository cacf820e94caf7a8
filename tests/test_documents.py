"""The documents: links lead somewhere, the README stays short, tables name what exists."""

import re
import runpy
from pathlib import Path

import pytest

from tests.factories.zoo import ZOO

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
# written by the prose rule of CONTRIBUTING.md; the others follow
PLAIN: tuple[str, ...] = (
    "README",
    "CHANGELOG",
    "CONTRIBUTING",
    "docs/glossary",
    "docs/how-it-works",
)
PLAIN += ("docs/structure", "docs/measured", "docs/serving", "docs/index", "docs/shipped")
PLAIN += tuple(
    path.relative_to(ROOT).with_suffix("").as_posix()
    for folder in ("tutorial", "how-to", "reference", "measured", "explanation")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    found: set[str] = set()
    for title in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(plain.replace(" ", "-"))
    return found


def broken(document: Path, text: str) -> list[str]:
    """Relative links of a document whose file or anchor does not exist."""
    faults = []
    for link in (a or b for a, b in LINK.findall(CODE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if (
            not target.exists()
            or anchor
            and anchor
            not in anchors(text if target == document else target.read_text(encoding="utf-8"))
        ):
            faults.append(link)
    return faults


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_and_anchors_resolve(name: str) -> None:
    document = ROOT / name
    assert broken(document, document.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    text = "# One two\n[a](#one-two) [b](#three) [c](LICENSE) [d](nowhere.md) `[e](code.md)`"
    assert broken(ROOT / "README.md", text) == ["#three", "nowhere.md"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", PLAIN)
def test_the_prose_rule_is_kept(name: str) -> None:
    found_in = runpy.run_path(str(ROOT / "scripts" / "words"))["found_in"]
    assert list(found_in(ROOT / f"{name}.md")) == []


def test_the_denoisers_of_the_table_are_cases_of_the_zoo() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert names
    assert set(names) <= set(ZOO)
    assert len(set(names)) == len(names)


def entries(text: str) -> list[str]:
    """The list items of a document, without the space around their lines."""
    found = re.findall(r"^- .*(?:\n  .*)*", text, re.M)
    return [" ".join(item.split())[2:] for item in found]


def long(text: str, most: int = 25) -> list[str]:
    return [item for item in entries(text) if len(item.split()) > most]


def test_an_entry_of_the_changelog_has_at_most_25_words() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(entries(text)) >= 30
    assert long(text) == []


def test_a_long_entry_is_found() -> None:
    words = " ".join(["word"] * 24)
    assert long(f"- {words}\n  end\n- {words} end more\n") == [f"{words} end more"]


def test_a_version_without_predecessor_lists_features_only() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if re.findall(r"^## (\S+)", text, re.M) == ["0.1.0,"]:
        assert re.findall(r"^### (Added|Changed|Fixed|Removed)", text, re.M) == []
        assert re.findall(r"\bbefore, |\bno longer\b|\bformer default\b", text) == []
