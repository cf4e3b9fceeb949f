"""Where a token comes from, and who is let in by it."""

from pathlib import Path

import pytest

from securevfl.core.errors import ConfigError
from securevfl.serving.guard import FILE, token_of

GOOD = "0123456789abcdef"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECUREVFL_TOKEN", raising=False)


def test_without_any_one_is_made_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    first = token_of(None, folder=tmp_path)
    made = tmp_path / FILE
    assert made.stat().st_mode & 0o077 == 0
    text = made.read_text().strip()
    assert first.fits(f"Bearer {text}".encode())
    assert not first.fits(f"Bearer {text[:-1]}".encode())
    assert not first.fits(None)
    assert text not in repr(first)
    assert token_of(None, folder=tmp_path).fits(f"Bearer {text}".encode())


def test_a_file_comes_before_the_variable_and_the_variable_before_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECUREVFL_TOKEN", GOOD)
    assert token_of(None, folder=tmp_path).fits(b"Bearer 0123456789abcdef")
    assert not (tmp_path / FILE).exists()
    own = tmp_path / "own"
    own.write_text(GOOD[::-1])
    own.chmod(0o600)
    assert token_of(own, folder=tmp_path).fits(b"Bearer fedcba9876543210")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "at least 16"),
        ("with spaces in its middle", 0o600, "without spaces"),
        (GOOD, 0o644, "others can read it"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(
    tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    own = tmp_path / "own"
    if text is not None:
        own.write_text(text)
        own.chmod(mode)
    with pytest.raises(ConfigError, match=said) as refused:
        token_of(own, folder=tmp_path)
    assert text is None or text not in str(refused.value)
