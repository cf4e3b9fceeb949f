"""What README says of other toolkits has a source, and what it says of this one is there."""

import tomllib
from datetime import date

import make_figures
import pytest

CONTENT = tomllib.loads(make_figures.PEERS.read_text(encoding="utf-8"))
NAMES = ("securevfl", *CONTENT["peers"])


@pytest.mark.parametrize("row", CONTENT["row"], ids=lambda row: row["what"])
def test_every_cell_has_a_word_a_link_and_a_date(row: dict[str, object]) -> None:
    assert set(row) == {"what", *NAMES}
    for name in NAMES:
        word, link, read = row[name]
        assert word.strip()
        assert isinstance(read, date)
        if name == "securevfl":
            assert (make_figures.ROOT / link).exists(), link
        else:
            assert link.startswith("https://")


@pytest.mark.parametrize(
    "word",
    ["CrypTen", "SplitAvg", "Paillier", "FedSim", "FedHSSL", "FeT", "accountant", "launcher"],
)
def test_the_words_of_the_description_are_on_the_first_page(word: str) -> None:
    """They are what a reader searches for."""
    page = (make_figures.ROOT / "README.md").read_text(encoding="utf-8")
    assert word.lower() in page.lower()
    if word == "CrypTen":
        assert word in page[: page.index("\n## ")], "CrypTen belongs on the first screen"
