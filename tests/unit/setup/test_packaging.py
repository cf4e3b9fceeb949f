"""Files to start a party with: they are of this version, and ask for what the command line has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from securevfl.cli.main import app
from securevfl.version import __version__

PACKAGING = Path(__file__).parents[3] / "packaging"
CHART = PACKAGING / "helm"
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def rendered(*settings: str) -> dict[str, Any]:
    """Return what the chart makes of a release named bank, by kind."""
    asked = ["helm", "template", "bank", str(CHART), "--set", ",".join(["party=bank", *settings])]
    text = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    return {one["kind"]: one for one in yaml.safe_load_all(text) if one}


def test_images_and_chart_are_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for file in ("compose.yaml", "Dockerfile"):
        named = re.findall(r"securevfl:([\d.]+\d)", (PACKAGING / file).read_text())
        assert named == [__version__]


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any]) -> None:
        assert set(values) == set(schema["properties"]) - {"global"}
        for name, value in values.items():
            if "properties" in schema["properties"][name]:
                compare(value, schema["properties"][name])

    schema = json.loads((CHART / "values.schema.json").read_text())
    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


def test_the_chart_gives_options_that_the_commands_have() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {
        name: {option for param in commands[name].params for option in param.opts}
        for name in ("party", "serve")
    }
    text = (CHART / "templates/_pod.tpl").read_text().partition('"securevfl.container"')[0]
    serving, running, both = (
        set(re.findall(r"--[a-z][a-z-]*", part))
        for part in re.split(r"\{\{- else -\}\}|(?=- --identity)", text)
    )
    assert {"--identity", "--data-root", "--listen"} == both
    assert serving | both <= known["serve"]
    assert running | both <= known["party"]


@needs_helm
def test_a_release_runs_one_party_without_rights() -> None:
    primary, secondary = rendered("listen=7431"), rendered("networkPolicy.enabled=true")
    assert set(primary) == {"Job", "Service"}
    assert set(secondary) == {"Job", "NetworkPolicy"}
    pod = primary["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in pod["containers"] + pod["initContainers"]:
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
    assert "--listen=0.0.0.0:7431" in pod["containers"][0]["args"]


@needs_helm
def test_a_release_serves_and_refuses_what_it_does_not_know() -> None:
    assert set(rendered("listen=7431", "serve=true")) == {"Deployment", "Service"}
    assert set(rendered("serve=true")) == {"Deployment"}
    with pytest.raises(subprocess.CalledProcessError):
        rendered("listn=7431")
