"""The benchmark of FedHSSL: it resumes, and its tables say what its results do."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import run_script

from research.common.folder_tables import data_folder
from research.fedhssl import tables


def lines(method: str, *values: float, **more: Any) -> list[dict[str, Any]]:
    return [
        {"set": "made", "method": method, "labelled": 20, "metric": "accuracy", "seed": seed}
        | {"value": value, **more}
        for seed, value in enumerate(values)
    ]


RESULTS = [
    *lines("fedsplitnn", 0.50, 0.60, 0.70),
    *lines("fedhssl", 0.54, 0.65, 0.76, algorithm="simsiam", aligned=0.4),
    *lines("fedgssl", 0.55, 0.65, algorithm="simsiam", aligned=0.4),
]


def test_gains_are_paired_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """Gains of 4, 5 and 6 points: mean 5, and 4.303 / sqrt(3) = 2.5 by Student's t (2 degrees)."""
    tables.print_gains(RESULTS)
    shown = capsys.readouterr().out
    names, _, row = (line.split(" | ") for line in shown.strip().splitlines()[-3:])
    cells = dict(zip(names, row, strict=True))
    assert cells["all of it"] == "+5.0 ± 2.5"
    # Two pairs are too few to say anything of.
    assert cells["aggregation"] == ""


def test_a_difference_beyond_its_interval_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_tables(RESULTS)
    shown = capsys.readouterr().out
    assert "| fedsplitnn | 0.600 ± 0.100 |" in shown
    assert "| fedhssl, simsiam | 0.650 ± 0.110 (better) |" in shown
    assert "| fedgssl, simsiam | 0.600 ± 0.071, n=2 |" in shown


def test_the_plot_is_drawn_from_the_same_results(tmp_path: Path) -> None:
    """And is the same every time: it lies in the repository."""
    for name in ("one.svg", "other.svg"):
        tables.plot(RESULTS, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert b"fedhssl" in (tmp_path / "one.svg").read_bytes()


def test_guidance_and_samples_have_tables_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gains of 4, 5 and 6 points by the mean of tops, and by cross-party learning."""
    few, more = (0.50, 0.60, 0.70), (0.54, 0.65, 0.76)
    of = {"algorithm": "simsiam", "aligned": 0.2}
    guided = [
        line
        for gamma in (0.0, 0.5)
        for line in (
            *lines("fedgssl", *few, gamma=gamma, **of),
            *lines("fedhssl", *more, gamma=gamma, **of),
        )
    ]
    tables.print_guidance(guided)
    row = "0.600 ± 0.100 | 0.650 ± 0.110 | +5.0 ± 2.5 |"
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"| made | simsiam | 0 | {row}",
        f"| made | simsiam | 0.5 | {row}",
    ]
    sampled = [
        *lines("fedlocalssl", *few, samples=0.2, algorithm="simsiam"),
        *lines("fedcssl", *more, samples=0.2, algorithm="simsiam"),
    ]
    tables.print_samples(sampled)
    assert capsys.readouterr().out.splitlines()[2:] == [f"| made | simsiam | 20% | {row}"]
    tables.plot_guidance(guided, tmp_path / "guidance.svg")
    assert b"gamma" in (tmp_path / "guidance.svg").read_bytes()


def test_shares_of_rows_are_measured_from_the_same_labels(tmp_path: Path) -> None:
    """Table IX through its command: two methods, three shares, one seed."""
    results = tmp_path / "samples.jsonl"
    command = ["samples", "--set", "fate_breast", "--seeds", 1, "--labelled", 20]
    if data_folder() is None:
        pytest.skip("SECUREVFL_DATA is not set")
    run_script("fedhssl/fedhssl.py", *command, "--results", results)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert {(line["method"], line["samples"]) for line in found} == {
        (method, share) for method in ("fedlocalssl", "fedcssl") for share in (0.2, 0.4, 1.0)
    }


def test_forms_are_held_against_the_defaults_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gains of 4, 5 and 6 points on one set, of 2, 3 and 4 on the other: 4 in the mean."""
    results = tmp_path / "forms.jsonl"
    found = []
    for number, name in enumerate(("digits", "mfeat")):
        of_set = {"set": name, "algorithm": "simsiam"}
        better = [0.54 - 0.02 * number, 0.65 - 0.02 * number, 0.76 - 0.02 * number]
        found += lines("fedhssl", 0.5, 0.6, 0.7, form="defaults", **of_set)
        found += lines("fedhssl", *better, form="views = apart", **of_set)
    results.write_text("".join(json.dumps(line) + "\n" for line in found))
    run_script("fedhssl/forms.py", "tables", "--results", results, "--mean")
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:] == [
        "| views = apart | defaults | fedhssl, simsiam | digits and mfeat | +4.0 ± 2.5 |  |  |"
    ]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """Accuracy, F1 and AUC of the test rows, once a cell."""
    results = tmp_path / "results.jsonl"
    command = ["run", "--set", "digits", "--seeds", 1, "--labelled", 20, "--results", results]
    for _ in range(2):
        run_script("fedhssl/fedhssl.py", *command, "--method", "fedsplitnn", "boosting")
    found = {line["method"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert found.keys() == {"fedsplitnn", "boosting"}
    assert len(results.read_text().splitlines()) == 2
    for line in found.values():
        assert line["value"] == line["accuracy"] > 0.2
        assert 0.2 < line["f1"] < 1
        assert 0.5 < line["auc"] < 1
