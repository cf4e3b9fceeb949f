"""What the page about extending tells people to write is what tests/extending runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
RUN = [
    path.read_text(encoding="utf-8")
    for kind in ("*.py", "*.toml")
    for path in sorted((ROOT / "tests" / "extending").rglob(kind))
]


def test_every_block_is_code_that_a_test_runs() -> None:
    """A family, a metric, a protection and an aggregation, to the letter."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 8
    assert [block for block in blocks if not any(block in code for code in RUN)] == []


def test_the_lines_that_it_names_go_where_it_says() -> None:
    """Each table is in the file that the page names, and still lists what is built in."""
    for file, table in re.findall(r"line is in `(securevfl/[^`]+)`: `[^`]+` in `(\w+)`", PAGE):
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^{table}(: Final.*)? = ", code, flags=re.MULTILINE), (file, table)
    assert len(re.findall(r"line is in `securevfl/", PAGE)) == 3
