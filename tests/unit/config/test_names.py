"""Names that become names of files: refused when the file is read, in one line."""

import pytest
import tomli_w

from securevfl import read_federation
from securevfl.core.errors import ConfigError
from securevfl.testing import write_federation
from securevfl.transport.identity import provision, trust

HOSTILE = [
    "",
    ".",
    "..",
    "../../x",
    "/abs",
    "a/b",
    "a\\b",
    "C:x",
    ".hidden",
    "line\nbreak",
    "tab\t",
    "nul\x00",
    "x" * 101,
    "con",
    "NUL.txt",
    "LPT1",
    "ends with a dot.",
    " in front",
    "--out",
    "-x",
    "what?",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_federation_with_such_a_name_is_refused(tmp_path, name):
    """The name is the run folder's: it must lead nowhere else."""
    path = write_federation(tmp_path, federation={"name": name})
    with pytest.raises(ConfigError, match=r"federation\.name: must be a plain file name") as caught:
        read_federation(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["banks of the north", "Straße-7", "x" * 100, "a.b", "console"])
def test_names_that_people_use_are_taken(tmp_path, name):
    """Spaces, letters of any alphabet and dots inside are fine."""
    path = write_federation(tmp_path, federation={"name": name})
    assert read_federation(path).federation.name == name


@pytest.mark.parametrize("name", ["../x", ".x", "a b", "", "x" * 41, "con", "LPT9", "--out", "-x"])
def test_a_party_with_such_a_name_is_refused(tmp_path, name):
    """A party's folder has its name."""
    path = write_federation(tmp_path)
    source = dict(read_federation(path).source)
    source["party"][1]["name"] = name
    path.write_text(tomli_w.dumps(source))
    with pytest.raises(ConfigError, match=r"party\[1\]\.name: must be"):
        read_federation(path)


def test_a_trusted_certificate_goes_nowhere_else(tmp_path):
    """The name under which a certificate is trusted is the name of its file."""
    provision(["agency"], tmp_path)
    with pytest.raises(ConfigError, match="name: must be a plain file name"):
        trust(tmp_path / "agency", "../agency", tmp_path / "agency" / "identity.pem")


def test_a_file_that_is_nested_too_deeply_is_one_line(tmp_path):
    """Brackets without end are no settings, and no traceback."""
    path = tmp_path / "fed.toml"
    path.write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_federation(path)
