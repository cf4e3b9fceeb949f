"""Tables of measurements on pages are those of the files that scripts wrote."""

import json
from pathlib import Path

import make_figures
import pytest

from research.common import figure_files

FILES = [*make_figures.FILES.values()]


def test_tables_are_those_of_the_files() -> None:
    """Run ``python tools/make_figures.py`` (``make docs-pages``) when this fails."""
    pages = {path: path.read_text(encoding="utf-8") for path in make_figures.PAGES}
    assert [path for path, page in pages.items() if make_figures.written(page) != page] == []


def test_every_table_and_every_file_is_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    measured = make_figures.measured

    def noted(name: str) -> make_figures.Measured:
        read.add(name)
        return measured(name)

    monkeypatch.setattr(make_figures, "measured", noted)
    pages = "".join(path.read_text(encoding="utf-8") for path in make_figures.PAGES)
    make_figures.written(pages)
    assert {path.stem for path in FILES} == read
    assert all(f"<!-- figures {name}: written by " in pages for name in make_figures.TABLES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_figures_are_as_old_as_their_code(path: Path) -> None:
    """Older ones are named, and are no failure: the benchmark may take hours."""
    changed = figure_files.changed(path)
    if changed:
        pytest.skip(f"{path.name} is older than {', '.join(changed)}")


def test_a_changed_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that a figure names, and in no other."""
    for room in ("models", "data"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "one.py").write_text("x = 1\n", encoding="utf-8")
    script = tmp_path / "measure.py"
    script.write_text("", encoding="utf-8")
    monkeypatch.setattr(figure_files, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "--seeds", "2"])

    path = figure_files.keep("some", {"gain": [1 / 3, 0.0]}, seeds=[0, 1], code=("models",))

    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["command"] == "python measure.py --seeds 2"
    assert kept["figures"] == {"gain": [0.333333, 0.0]}
    assert figure_files.changed(path) == []
    (tmp_path / "data/one.py").write_text("x = 2\n", encoding="utf-8")
    assert figure_files.changed(path) == []
    (tmp_path / "models/two.py").write_text("", encoding="utf-8")
    assert figure_files.changed(path) == ["models"]
    script.unlink()
    assert figure_files.changed(path) == ["measure.py", "models"]
