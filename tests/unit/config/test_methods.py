"""Settings of a comparison's methods: what is inherited, overridden, refused."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.lab.methods import baseline_settings, known_methods, method_source_of
from securevfl.lab.one_run import method_config
from securevfl.testing import save_federation, write_federation


def read(folder: Path, **methods: dict[str, Any]) -> FederationConfig:
    return read_federation(write_federation(folder, secondaries=1, rows=60, methods=methods))


def test_a_method_has_its_own_settings_on_top_of_the_file(tmp_path: Path) -> None:
    """Training and model fields stand side by side; a variant has its family's table beneath."""
    config = read(
        tmp_path,
        fet={"dropout": 0.3, "learning_rate": 0.5},
        narrow={"family": "fet", "hidden": 4, "learning_rate": 0.25},
    )
    fet, narrow = (method_config(config, name) for name in ("fet", "narrow"))
    assert (fet.model.dropout, fet.model.hidden, fet.training.learning_rate) == (0.3, 8, 0.5)
    assert (narrow.model.dropout, narrow.model.hidden, narrow.training.learning_rate) == (
        0.3,
        4,
        0.25,
    )
    for one in (fet, narrow):
        assert one.family.name == "fet"
        assert (one.model.neighbours, one.training.epochs) == (4, 2)
        assert one.parties == config.parties
    assert config.training.learning_rate == 5e-3


def test_each_family_has_its_step_size_where_the_file_says_none(tmp_path: Path) -> None:
    """One written rate is everybody's; otherwise FedHSSL's parts take smaller steps than others."""
    path = write_federation(tmp_path, secondaries=1, rows=60)
    written = read_federation(path)
    source = tomllib.loads(path.read_text())
    del source["training"]["learning_rate"]
    silent = read_federation(save_federation(tmp_path, source))

    for method, expected in {
        "fet": 3e-3,
        "top1sim": 3e-3,
        "fedhssl": 1e-3,
        "fedsplitnn": 1e-3,
    }.items():
        assert method_config(silent, method).learning_rate == expected
        assert method_config(written, method).learning_rate == 5e-3


def test_baselines_have_settings_of_their_own(tmp_path: Path) -> None:
    """Solo and combine are perceptrons: the federation's model says nothing about them."""
    config = read(tmp_path, solo={"epochs": 3, "hidden": [5]})
    assert baseline_settings(config.source, "solo").hidden == (5,)
    assert baseline_settings(config.source, "combine").epochs == 200
    assert method_config(config, "solo").source["model"] == config.source["model"]


def test_methods_adapt_to_a_file_that_was_written_for_another_family(tmp_path: Path) -> None:
    """K = 4, pooled records and an encoder of few numbers: what a family can't take is changed."""
    path = write_federation(
        tmp_path,
        secondaries=2,
        rows=60,
        model={"family": "fet", "neighbours": 4, "hidden": 6, "release": "pooled"},
        privacy={"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
        linkage={"choose": "records"},
        encoder={"method": "principal"},
    )
    config = read_federation(path)
    assert config.model.attention_heads == 3
    for name in ("fedsim", "avgsim", "top1sim", "fedhssl"):
        own = method_config(config, name)
        assert (own.linkage.choose, own.encoder) == ("rows", None)
        assert own.model.hidden == 6
        assert own.model.neighbours == (4 if name in ("fedsim", "avgsim") else 1)
        notes = method_source_of(config, name)[1]
        assert any("[encoder]" in note for note in notes)
        assert any(note.startswith("without release of [model]") for note in notes)
        assert any("one link" in note for note in notes) == (own.model.neighbours == 1)
    assert method_config(config, "fedsim").model.step == 4
    assert method_config(config, "fet").linkage.choose == "records"
    assert method_source_of(config, "fet")[1] == method_source_of(config, "solo")[1] == ()


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            {"family": "top1sim", "neighbours": 4},
            ["family 'top1sim': neighbours is always 1 there", "leave it out", "hidden, keys_as"],
        ),
        (
            {"family": "fedhssl", "keys_as_features": True},
            ["keys_as_features is always False there"],
        ),
        (
            {"family": "fedsim", "fourier_width": 4},
            [
                "fet have it",
                "[methods.fet]",
                "the nearest is '",
                "fedsim has: channels",
            ],
        ),
    ],
)
def test_a_field_of_another_family_is_refused_with_the_table_to_write(
    model: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    """What a family has instead, which field is nearest, and where this one would go."""
    with pytest.raises(ConfigError) as caught:
        read_federation(write_federation(tmp_path, model=model))
    for part in parts:
        assert part in str(caught.value)


def test_what_records_need_is_said_with_a_way_out(tmp_path: Path) -> None:
    """Noise and promise taken out of a file that chooses by records."""
    path = write_federation(tmp_path, linkage={"choose": "records"}, model={"release": "pooled"})
    with pytest.raises(ConfigError) as caught:
        read_federation(path)
    assert str(caught.value).endswith(
        'linkage.choose: "records" needs privacy.encoder = "frozen" and privacy.links_per_record; '
        'write that, or linkage.choose = "rows"'
    )


@pytest.mark.parametrize(
    ("sections", "meant"),
    [
        ({"privacy": {"mechanism": "none", "encoder": "frozn"}}, "frozen"),
        ({"training": {"optimizer": "adanw"}}, "adamw"),
        ({"training": {"metric": "acuracy"}}, "accuracy"),
        ({"model": {"family": "fedsim", "merge": "residuel"}}, "residual"),
        ({"model": {"family": "FeT"}}, "fet"),
        ({"model": {"family": "fet", "preset": "papr"}}, "paper"),
        ({"linkage": {"metric": "euclidian"}}, "euclidean"),
        ({"linkage": {"protection": "sharess"}}, "shares"),
        ({"federation": {"task": "regresion"}}, "regression"),
        ({"methods": {"mine": {"family": "fedsym"}}}, "fedsim"),
    ],
)
def test_misspelt_values_get_a_suggestion(
    sections: dict[str, Any], meant: str, tmp_path: Path
) -> None:
    """As unknown fields do."""
    with pytest.raises(ConfigError, match=rf"did you mean '{meant}'\?"):
        read_federation(write_federation(tmp_path, **sections))


def test_known_methods_are_families_baselines_and_variants(tmp_path: Path) -> None:
    """What an unknown name is answered with."""
    config = read(tmp_path, narrow={"family": "fet"})
    assert {"solo", "combine", "fet", "narrow"} <= set(known_methods(config.source))
    with pytest.raises(ConfigError, match=r"method 'fedsym': is neither .* 'solo', .*'narrow'"):
        method_config(config, "fedsym")


@pytest.mark.parametrize(
    ("methods", "complaint"),
    [
        (
            {"fet": {"hiden": 4}},
            r"method 'fet': model\.hiden: no such field; did you mean 'hidden'",
        ),
        ({"fet": {"epochs": 0}}, r"method 'fet': training\.epochs"),
        ({"solo": {"neighbours": 4}}, r"methods\.solo\.neighbours: no such field"),
        ({"fet": {"test_fraction": 0.1}}, r"methods\.fet\.test_fraction: must be the same"),
        ({"fet": {"keys_as_features": True}}, r"set model\.keys_as_features"),
        ({"mine": {"hidden": 4}}, r"method 'mine': is neither a family"),
        ({"fet": {"family": "solo"}}, r"methods\.fet\.family"),
        ({"../up": {"family": "fet"}}, r"letters, digits"),
    ],
)
def test_wrong_tables_are_refused_with_the_file(
    methods: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """Every command that reads the file says so, not only the comparison."""
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, **methods)


def test_methods_must_be_tables(tmp_path: Path) -> None:
    """``[methods] fet = 3`` is no table."""
    with pytest.raises(ConfigError, match=r"methods\.fet: must be a table"):
        read_federation(write_federation(tmp_path, methods={"fet": 3}))


def test_parts_of_fedhssl_share_its_network_and_may_pretrain_otherwise(tmp_path: Path) -> None:
    """Related families inherit the whole model; ``pretraining`` is a table of its own."""
    config = read_federation(
        write_federation(
            tmp_path,
            secondaries=1,
            rows=60,
            model={"family": "fedhssl", "hidden": 8, "norm": "layer", "encoders": "local"},
            pretraining={"iterations": 3, "algorithm": "byol"},
            methods={"moco": {"family": "fedhssl", "pretraining": {"algorithm": "moco"}}},
        )
    )
    for name in ("fedsplitnn", "fedlocalssl", "fedcssl", "fedgssl"):
        method = method_config(config, name)
        assert (method.model.hidden, method.model.norm) == (8, "layer")
        assert method.model.encoders == "both"
        assert method.pretraining == config.pretraining
    moco = method_config(config, "moco")
    assert (moco.pretraining.algorithm, moco.pretraining.iterations) == ("moco", 3)
    assert moco.model.encoders == "local"
    with pytest.raises(ConfigError, match=r"labelled_rows: must be the same for all"):
        read(tmp_path, fet={"labelled_rows": 5})
