"""A dealer for class means alone: when it may and must be there, and who does without it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.class_means import write_class_means

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers
from securevfl.core.errors import ConfigError
from securevfl.federation.session.membership import callers_in_predictions, idle_helpers
from securevfl.testing import save_federation

RANGES = [[-1.0, 11.0], [-1.0, 11.0]]
HIDING: dict[str, Any] = {"protection": "bloom", "ranges": RANGES}


def federation(folder: Path, *roles: str, **sections: Any) -> FederationConfig:
    source = tomllib.loads(write_class_means(folder, dealer=False, **sections).read_text())
    source["party"] += [{"name": f"the-{role}", "role": role} for role in roles]
    return read_federation(save_federation(folder, source))


def test_class_means_under_masks_need_a_dealer(tmp_path: Path) -> None:
    """Between processes; a simulation does without. The line to add is told."""
    config = federation(tmp_path)
    with pytest.raises(ConfigError, match=r'encoder\.labels: "shares" needs .* role = "dealer"'):
        require_helpers(config)
    require_helpers(federation(tmp_path, "dealer"))
    require_helpers(federation(tmp_path, labels="plaintext"))


def test_a_dealer_with_nothing_to_deal_is_refused(tmp_path: Path) -> None:
    """Neither linkage nor class means ask it for anything, and all would wait for it."""
    with pytest.raises(ConfigError, match=r'"dealer" goes with .*"shares", encoder\.labels'):
        federation(tmp_path, "dealer", labels="randomised")
    with pytest.raises(ConfigError, match='"dealer" goes with'):
        federation(tmp_path, "coordinator", "dealer", labels="plaintext", linkage=HIDING)


def test_linking_does_without_a_dealer_for_class_means(tmp_path: Path) -> None:
    """Wherever it stands in the file, the ranks of those that link are those of the federation."""
    for roles in (("dealer", "coordinator"), ("coordinator", "dealer")):
        config = federation(tmp_path, *roles, linkage=HIDING)
        linking = link_spec(config).roles
        assert dict(linking.helpers) == {"coordinator": "the-coordinator"}
        assert linking.ranks == {n: r for n, r in config.ranks.items() if n != "the-dealer"}
        assert config.ranks["the-dealer"] == 4
    shares = {"protection": "shares", "ranges": RANGES}
    both = federation(tmp_path, "dealer", "coordinator", linkage=shares)
    assert set(link_spec(both).roles.helpers) == {"coordinator", "dealer"}


def test_predictions_wait_for_no_dealer_of_class_means(tmp_path: Path) -> None:
    """New rows are never voted on; a dealer of linkage comes for them too."""
    config = federation(tmp_path, "dealer", "coordinator", linkage=HIDING)
    assert idle_helpers(config) == ("the-dealer",)
    assert callers_in_predictions(config, None) == ("bank-1", "bank-2", "the-coordinator")
    assert callers_in_predictions(config, (2,)) == ("bank-2", "the-coordinator")
    shares = {"protection": "shares", "ranges": RANGES}
    assert idle_helpers(federation(tmp_path, "dealer", "coordinator", linkage=shares)) == ()


@pytest.mark.parametrize(
    ("labels", "reveals", "guarantee"),
    [
        ("plaintext", "every secondary: each training row's label", "not covered"),
        ("randomised", "randomised response", "label_epsilon = 2, .* all secondaries together"),
        ("shares", "each secondary: the sum of its own records", "one secondary that follows"),
    ],
)
def test_who_learns_what_is_said(labels: str, reveals: str, guarantee: str, tmp_path: Path) -> None:
    """Reports show a line for labels; under masks the primary sees class sums, and that is said."""
    roles = ("dealer",) if labels == "shares" else ()
    found = {one["channel"]: one for one in channels(federation(tmp_path, *roles, labels=labels))}
    told = found["labels that class means are fitted to"]
    assert reveals in told["reveals"]
    assert re.search(guarantee, told["guarantee"])
    seen = found["fitting of encoders"]["reveals"]
    assert ("the primary: each secondary's sum" in seen) == (labels == "shares")
    assert "dealer" not in found["linkage"]["reveals"]


@pytest.mark.parametrize(
    ("labels", "task", "epsilon"),
    [
        ("randomised", "multiclass", 5e-7),
        ("shares", "multiclass", 5e-7),
        ("randomised", "regression", 1.5e-6),
    ],
)
def test_a_label_epsilon_that_leaves_nothing_is_refused_with_the_file(
    labels: str, task: str, epsilon: float, tmp_path: Path
) -> None:
    """Not in the middle of a run; a regression's is divided among the rows that a label moves."""

    def read(asked: float) -> FederationConfig:
        roles = ("dealer",) if labels == "shares" else ()
        told = {"labels": labels, "encoder": {"label_epsilon": asked}}
        if task == "regression":
            told["model"] = {"release": "pooled", "hidden": 1, "heads": 1}
        return federation(tmp_path, *roles, federation={"task": task}, **told)

    with pytest.raises(ConfigError, match=r"encoder\.label_epsilon: must be at least"):
        read(epsilon)
    assert read(2 * epsilon).labels_moved == (2 if task == "regression" else 1)
