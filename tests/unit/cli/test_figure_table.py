"""Tables of figures fit the terminal, and no figure of them is cut short."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from securevfl.desk.printing import print_figures

HEAD = [
    *("metric", "fet (joint)", "95% interval", "fet, validation rows", "alone (network)"),
    *("fet without noise (simulated)", "combine (all features in one place)"),
]
ROW = ["balanced_accuracy", "0.8373", "0.8018 to 0.8714", "0.8713", "0.7411", "0.9002", "0.9755"]


def printed(table: list[list[str]], *, width: int, names: int = 1) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_figures(console, table, title="test rows", names=names)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_on_eighty_columns_every_figure_is_whole_beside_its_metric() -> None:
    """The demo's table: in two pieces, each beginning with the metric's name."""
    lines = printed([HEAD, ROW], width=80)
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if ROW[0] in line]
    assert len(shown) == 2
    assert all(any(cell in line for line in shown) for cell in ROW)
    assert sum("test rows" in line for line in lines) == 1


def test_where_there_is_room_it_is_one_table() -> None:
    """No piece more than the width asks for."""
    assert sum(ROW[0] in line for line in printed([HEAD, ROW], width=200)) == 1


WORDS = st.text(alphabet="abc0.", min_size=1, max_size=12)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=3, max_size=12), st.integers(1, 2))
def test_whatever_the_cells_are_none_is_cut(columns: list[tuple[str, str]], names: int) -> None:
    """Names of up to 12 letters and a figure of up to 12 fit 60 columns."""
    lines = printed([list(row) for row in zip(*columns, strict=True)], width=60, names=names)
    assert max(map(len, lines)) <= 60
    text = "\n".join(lines)
    assert all(heading in text and cell in text for heading, cell in columns)
