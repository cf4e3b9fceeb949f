"""Whatever the repository cites of itself is there: files, and sections of its documents."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("securevfl", "tests", "research", "examples", "docs")

# Documents that commands write, and that the text names as their output.
WRITTEN = frozenset({"comparison.md"})

DOCUMENT = re.compile(r"(?<![\w:./-])[\w./-]*\w\.md\b")
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|toml|json|svg|j2)\b")
SECTION = re.compile(r"((?:docs|research/\w+)/[\w-]+\.md), section\s+(\d+)")
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TITLE = re.compile(r'((?:docs|research/\w+)/[\w-]+\.md),(?: section \d+,)? "([^"]+)"')


@cache
def texts() -> dict[Path, str]:
    """Return every text of the repository, each sentence on one line."""
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in FOLDERS:
        paths += [p for kind in ("py", "md", "toml") for p in (ROOT / folder).rglob(f"*.{kind}")]
    # A citation may be wrapped, within a comment too.
    return {
        path: re.sub(r"\s*\n[ \t]*#?[ \t]*", " ", path.read_text(encoding="utf-8"))
        for path in paths
        if path != Path(__file__)
    }


NAME = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?(securevfl[\w.]*)`")


def is_there(name: str) -> bool:
    """Whether a module, or something in one, has this name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            one = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            one = getattr(one, part, None)
        return one is not None
    return False


def found(pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for path, text in texts().items():
        for match in pattern.finditer(text):
            yield path, match


def test_every_document_that_is_cited_is_here() -> None:
    """Seen from the root or from the file that cites it."""
    missing, seen = [], 0
    for path, match in found(DOCUMENT):
        seen += 1
        name = match.group()
        if name not in WRITTEN and not any((base / name).exists() for base in (ROOT, path.parent)):
            missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
    assert seen > 50


def test_every_name_that_a_docstring_cites_is_here() -> None:
    """A reader follows it."""
    cited = {(match.group(1), path) for path, match in found(NAME)}
    missing = sorted(
        f"{path.relative_to(ROOT)}: {name}" for name, path in cited if not is_there(name)
    )
    assert missing == []
    assert len(cited) > 50


def test_every_path_that_is_cited_is_here() -> None:
    """Programs, tests and tables that documents and docstrings name.

    After the name of another repository, as in "data61/clkhash, tests/x.py", the path is there.
    """
    elsewhere = re.compile(r"[\w-]+/[\w-]+, $")
    cited = [
        (path, match.group())
        for path, match in found(PATH)
        if not elsewhere.search(match.string, match.start() - 60, match.start())
    ]
    assert [f"{path.name}: {name}" for path, name in cited if not (ROOT / name).exists()] == []
    assert len(cited) > 20


def test_every_section_that_is_cited_is_there() -> None:
    """By its number or by its words."""
    missing, seen = [], 0
    for path, match in found(SECTION):
        seen += 1
        if f"\n## {match[2]}. " not in (ROOT / match[1]).read_text(encoding="utf-8"):
            missing.append(f"{path.name}: {match.group()}")
    for path, match in found(TITLE):
        seen += 1
        if match[2] not in texts()[ROOT / match[1]]:
            missing.append(f"{path.name}: {match.group()}")
    assert missing == []
    assert seen > 15


def test_every_link_of_research_leads_to_a_section() -> None:
    """The site is checked by mkdocs; these pages are not part of it."""
    pages = [ROOT / "README.md", *(ROOT / "research").rglob("*.md")]
    missing = []
    for page in pages:
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            target = page.parent / match[1]
            if not target.exists() or (match[2] and match[2] not in anchors_of(target)):
                missing.append(f"{page.relative_to(ROOT)}: {match.group()[2:-1]}")
    assert missing == []


@cache
def anchors_of(page: Path) -> set[str]:
    """Return what a page's headings are called in links, and the anchors that it sets itself."""
    text = page.read_text(encoding="utf-8")
    headings = [re.sub(r"[^\w\s-]", "", one).strip().lower() for one in HEADING.findall(text)]
    return {re.sub(r"[-\s]+", "-", one) for one in headings} | set(re.findall(r'id="(\w+)"', text))


def test_no_plan_is_cited_that_only_its_authors_have() -> None:
    """Such as "DESIGN 7": documents are cited by the name of their file."""
    plan = re.compile(r"\b(?:DESIGN|HOUSE|REVIEW|SPEED|STYLE|UTILITY)\b")
    assert [f"{path.name}: {match.group()}" for path, match in found(plan)] == []
