"""The linkage secret: wrong or missing ones are noticed before linking."""

from pathlib import Path

import pytest

from securevfl.core.errors import ConfigError
from securevfl.linkage.spec import LinkageSecret

SECRET = LinkageSecret(bytes(range(32)))


def test_equal_secrets_have_equal_check_values() -> None:
    """In one session; another session's value is no good."""
    same = LinkageSecret(bytes(range(32)))

    assert same.check_value("run-1") == SECRET.check_value("run-1")
    assert same.check_value("run-1") != SECRET.check_value("run-2")


def test_one_bit_makes_another_secret() -> None:
    """The check value tells."""
    other = LinkageSecret(bytes([1, *range(1, 32)]))

    assert other.check_value("run") != SECRET.check_value("run")


def test_purposes_have_keys_of_their_own() -> None:
    """Fields, and check values, never share a key."""
    keys = {SECRET.subkey("text", "a"), SECRET.subkey("text", "b"), SECRET.subkey("text\x1fa", "")}

    assert len(keys) == 3
    assert SECRET.check_value("text") not in {key.hex() for key in keys}


def test_fresh_secrets_differ() -> None:
    """They come from the operating system."""
    one, other = LinkageSecret.fresh(), LinkageSecret.fresh()

    assert one.subkey("a") != other.subkey("a")


def test_a_secret_shows_its_size_only() -> None:
    """Its text can be logged."""
    assert repr(SECRET) == "LinkageSecret(256 bits)"


def test_a_secret_file_is_hexadecimal(tmp_path: Path) -> None:
    """What a file holds is the key itself."""
    path = tmp_path / "secret"
    path.write_text(bytes(range(32)).hex() + "\n")

    assert LinkageSecret.from_file(path).subkey("a") == SECRET.subkey("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"00" * 15, "must have 16 to 64 bytes, got 15"),
        (b"00" * 65, "must have 16 to 64 bytes, got 65"),
        (b"correct horse battery staple", "must be hexadecimal digits"),
        ("pässwort".encode(), "must be hexadecimal digits"),
        (None, "No such file"),
    ],
)
def test_bad_secret_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    """Short keys can be guessed; passwords are no keys."""
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        LinkageSecret.from_file(path)
