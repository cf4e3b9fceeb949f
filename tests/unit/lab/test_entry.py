"""Linkage alone and comparisons from Python."""

import json
from pathlib import Path

import securevfl as sv
from securevfl.testing import write_federation


def test_link_returns_what_it_writes(tmp_path: Path) -> None:
    """With a folder the figures lie there too; without one they are the same."""
    path = write_federation(tmp_path, rows=60)
    kept = sv.link(path, out=tmp_path / "links")
    gone = sv.link(sv.read_federation(path), data_root=tmp_path)

    written = json.loads((tmp_path / "links" / "links.json").read_text())
    assert written["secondaries"].keys() == kept.figures["secondaries"].keys()
    assert kept.curves == gone.curves
    assert [len(curve) for curve in kept.curves.values()] == [240, 240]


def test_compare_returns_its_table(tmp_path: Path) -> None:
    """Solo on two seeds, by the path of a file; what was trained is not trained again."""
    path = write_federation(tmp_path, rows=60, training={"epochs": 1, "batch_size": 32})
    figures = sv.compare(path, ["solo"], seeds=2, out=tmp_path / "compared")
    again = sv.compare(path, ["solo"], seeds=2, out=tmp_path / "compared")

    assert figures == again
    assert figures == json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert len(figures["methods"]["solo"]["seeds"]) == 2
    assert "folder" not in sv.compare(path, ["solo"], seeds=1)


def test_settings_are_values_and_texts(tmp_path: Path) -> None:
    """Of a file that was read, too; without a folder nothing is kept."""
    path = write_federation(
        tmp_path, rows=60, secondaries=1, training={"epochs": 1, "batch_size": 32}
    )
    config = sv.read_federation(path)
    settings = {"model.hidden": [4], "model.dropout": "0.1,0.2"}
    figures = sv.compare(config, settings=settings, seeds=1, data_root=tmp_path)

    names = [f"model.hidden=4,model.dropout={rate}" for rate in (0.1, 0.2)]
    assert list(figures["methods"]) == ["alone", *names]
    assert "folder" not in figures
