"""What a file leaves to the rule: filled in where it is silent, shown, and agreed on."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, DataError
from securevfl.desk.setup.check import check_federation
from securevfl.federation.run_plan import run_facts
from securevfl.testing import read_tables, save_federation, write_federation


def source(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a file that says no more than it must."""
    written = tomllib.loads(write_federation(folder).read_text(encoding="utf-8"))
    for party in written["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return {
        "federation": {**written["federation"], "classes": 3},
        "encoder": {"method": "auto"},
        "privacy": {"epsilon": 8.0},
        "linkage": {"protection": "none"},
        "party": written["party"],
        **sections,
    }


def read(folder: Path, **sections: Any) -> FederationConfig:
    return parse_federation(source(folder, **sections), file="fed.toml")


def test_a_file_that_says_nothing_gets_a_whole_frozen_run_that_class_means(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.encoder is not None
    assert config.top is not None
    assert (config.encoder.method, config.encoder.labels) == ("class-means", "randomised")
    assert config.family.cut_shape(config.model) == (1, 3)
    assert (config.top.name, config.privacy.encoder) == ("mixed", "frozen")
    assert (config.linkage.choose, config.privacy.links_per_record) == ("records", 1)
    assert config.chosen["model.numbers"] == 3
    assert config.training.batch_size == config.chosen["training.batch_size"] == 1024
    assert config.chosen["linkage.choose"] == "records"


def test_what_the_file_says_is_kept_and_not_called_chosen(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        model={"family": "class-means", "neighbours": 7},
        encoder={"method": "auto", "labels": "plaintext"},
    )
    assert config.model.neighbours == 7
    assert config.encoder is not None
    assert config.encoder.labels == "plaintext"
    assert not {"model.neighbours", "model.family", "encoder.labels"} & set(config.chosen)


def test_a_networks_family_does_not_go_with_what_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.family: .* leave \[model\] out"):
        read(tmp_path, model={"family": "fet", "top": "additive"})


@pytest.mark.parametrize("family", ["avgsim", "fedsplitnn"])
def test_equal_ids_are_linked_one_to_one_unless_the_file_says_more(
    family: str, tmp_path: Path
) -> None:
    written = tomllib.loads(write_federation(tmp_path).read_text(encoding="utf-8"))
    written["linkage"] = {"protection": "none", "metric": "exact"}
    written |= {"model": {"family": family}, "privacy": {"mechanism": "none"}}
    assert parse_federation(written, file="fed.toml").model.neighbours == 1
    if family != "fedsplitnn":
        written["model"]["neighbours"] = 3
        assert parse_federation(written, file="fed.toml").model.neighbours == 3


@pytest.mark.parametrize(("metric", "links"), [("levenshtein", 4), ("exact", 1)])
def test_keys_that_are_no_numbers_are_no_inputs(metric: str, links: int, tmp_path: Path) -> None:
    """And equal ids are linked one to one."""
    config = read(tmp_path, linkage={"protection": "none", "metric": metric})
    assert config.model.neighbours == links
    assert not config.model.keys_as_features
    assert config.chosen["model.keys_as_features"] is False
    assert "model.keys_as_features" not in read(tmp_path).chosen


def test_a_dealer_in_the_file_keeps_labels_at_home(tmp_path: Path) -> None:
    parties = [*source(tmp_path)["party"], {"name": "dealer", "role": "dealer"}]
    config = read(tmp_path, party=parties)
    assert config.encoder is not None
    assert config.encoder.labels == "shares"


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_tasks_without_several_classes_need_no_number_of_them(task: str, tmp_path: Path) -> None:
    config = read(tmp_path, federation={"name": "test", "task": task})
    assert config.family.cut_shape(config.model) == (1, 1)


def test_parties_agree_on_what_was_chosen(tmp_path: Path) -> None:
    """A file that says all by itself is the same agreement, and one that differs is another."""
    auto = read(tmp_path)
    written = {
        name: dict(table) if name != "party" else table for name, table in auto.source.items()
    }
    assert parse_federation(written, file="fed.toml").digest == auto.digest
    written["model"]["numbers"] = 4
    assert parse_federation(written, file="fed.toml").digest != auto.digest


def test_a_number_of_classes_is_asked_for_and_held_to_the_label(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"federation\.classes"):
        read(tmp_path, federation={"name": "test", "task": "multiclass"})
    config = read(tmp_path, federation={"name": "test", "task": "multiclass", "classes": 4})
    table = read_tables(config, tmp_path)["agency"]
    with pytest.raises(DataError, match=r"3 classes, and federation\.classes says 4"):
        run_facts(config, table)


def test_check_says_what_was_chosen_or_what_is_missing(tmp_path: Path) -> None:
    found = check_federation(save_federation(tmp_path, source(tmp_path)))
    assert found.as_json()["chosen"]["encoder.method"] == "class-means"
    assert found.fine, found.problems
    without = source(tmp_path, federation={"name": "test", "task": "multiclass"})
    (problem,) = check_federation(save_federation(tmp_path, without)).problems
    assert problem.startswith("federation.classes")
