"""The documents stay short enough to be read."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_all_pages_together_have_at_most_forty_thousand_words() -> None:
    """Each new fact looks small by itself: only a bound on all pages makes old words give way."""
    words = {
        str(page.relative_to(DOCS)): len(page.read_text(encoding="utf-8").split())
        for page in DOCS.glob("**/*.md")
    }
    assert len(words) > 30
    total = sum(words.values())
    assert total <= 40_000, f"{total} words; longest pages: {sorted(words, key=words.get)[-5:]}"
