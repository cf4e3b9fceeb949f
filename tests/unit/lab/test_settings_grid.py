"""What ``--set`` understands: values of TOML, words, and names of settings."""

import re

import pytest

from securevfl.core.errors import ConfigError
from securevfl.lab.settings_grid import Point, parse_setting


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("model.neighbours=1,10,50", "model.neighbours", (1, 10, 50)),
        ("training.learning_rate=1e-3,0.5", "training.learning_rate", (1e-3, 0.5)),
        ("model.top=network, boosting", "model.top", ("network", "boosting")),
        ('a.b="x,y",true', "a.b", ("x,y", True)),
        ("pretraining.projector=[8,8],[16]", "pretraining.projector", ([8, 8], [16])),
    ],
)
def test_values_of_a_grid(text: str, name: str, values: tuple[object, ...]) -> None:
    """Commas within quotes and brackets part nothing."""
    setting = parse_setting(text)
    assert (setting.name, setting.values) == (name, values)
    assert [type(one) for one in setting.values] == [type(one) for one in values]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model.neighbours", "must be NAME=VALUES"),
        ("model.neighbours=", "must be NAME=VALUES"),
        ("neighbours=1", "'neighbours': is no setting; write TABLE.FIELD"),
        ("seed=1", "'seed': is no setting"),
        ("model.neighbours=1,,2", "model.neighbours: '' is no value of TOML"),
        ("model.neighbours=1,2,1", "model.neighbours: 1 is named twice"),
        ("model.dropout=0..0.5", "'0..0.5' is no value of TOML and no word"),
        ("methods.fet.hidden=1", "must be the same for all runs"),
        ("federation.seed=1,2", "--seeds says how many seeds"),
        ("training.metric=f1,auc", "must be the same for all runs"),
        ("model.hidden=a b", "'a b' is no value of TOML and no word"),
    ],
)
def test_what_is_refused(text: str, complaint: str) -> None:
    """One line, that names the setting."""
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse_setting(text)


def test_points_have_folders_of_their_own() -> None:
    """Readable where it goes; never a path, never one name for two points, never too long."""
    plain = Point(settings={"model.hidden": 8, "training.learning_rate": 1e-3})
    assert plain.name == "model.hidden=8,training.learning_rate=0.001"
    odd = [Point(settings={"party.a.data": text}).name for text in ("../x/y", "..-x/y", "..-x-y")]
    assert len(set(odd)) == 3
    assert not any("/" in name for name in odd)
    long = [Point(settings={"a.b": "x" * 300 + end}).name for end in "yz"]
    assert len(set(long)) == 2
    assert max(map(len, long)) < 200
