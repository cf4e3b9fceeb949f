"""The stages of a run follow from the federation file, and do nothing unless they say so."""

from pathlib import Path

import pytest
from helpers.class_means import write_class_means
from helpers.federations import write_overlapping

from securevfl.config.reading import read_federation
from securevfl.config.stage_policy import policies
from securevfl.federation.stage import run_stages
from securevfl.testing import write_federation


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_federation, []),
        (write_class_means, ["class_means"]),
        (write_overlapping, ["pretraining"]),
    ],
)
def test_a_run_has_the_stages_that_its_file_asks_for(write, names, tmp_path: Path) -> None:
    config = read_federation(write(tmp_path))
    assert [stage.name for stage in run_stages(config)] == names
    assert list(policies(config)) == names


def test_a_stage_that_needs_a_dealer_says_so(tmp_path: Path) -> None:
    config = read_federation(write_class_means(tmp_path))
    (policy,) = policies(config).values()
    assert policy.helpers(config) == ("dealer",)
    assert policy.label_release(config).mechanism == "shares"
