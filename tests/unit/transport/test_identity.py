import datetime
import os
import stat
import tempfile

import pytest
from cryptography.exceptions import InvalidSignature

from securevfl.core.errors import AuthenticationError, ConfigError
from securevfl.transport.connection import check_pins, tls_context
from securevfl.transport.identity import (
    Identity,
    check_validity,
    own_identity,
    parse_public_text,
    provision,
    public_text,
    trust,
    verify,
)


@pytest.fixture
def rental():
    return Identity.create("rental", valid_days=1, hosts=["127.0.0.1", "rental.example"])


def test_a_saved_identity_comes_back(rental, tmp_path):
    """Saving and loading keeps the key: what one signs, the other's text verifies."""
    rental.trusting({"rental": rental.certificate}).save(tmp_path)
    loaded = Identity.load(tmp_path, "rental")
    assert loaded.public_text == rental.public_text
    assert list(loaded.trusted) == ["rental"]
    verify(rental.public_text, loaded.sign(b"hello"), b"hello")


def test_the_private_key_is_for_its_owner_alone(rental, tmp_path):
    """The key file has mode 0600, and a looser one is refused with the way out."""
    rental.save(tmp_path)
    path = tmp_path / "identity.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load(tmp_path, "rental")


def test_a_key_is_never_overwritten(rental, tmp_path):
    """Saving a second identity into the same folder is refused and changes nothing."""
    rental.save(tmp_path)
    with pytest.raises(ConfigError, match="never overwritten"):
        Identity.create("rental", valid_days=1).save(tmp_path)
    assert Identity.load(tmp_path, "rental").public_text == rental.public_text


def test_repr_shows_no_key(rental):
    """Neither the private key nor its object appears in the text form."""
    assert repr(rental) == "Identity(name='rental')"


def test_another_partys_folder_is_refused(rental, tmp_path):
    """Loading names whose certificate was found and whose was wanted."""
    rental.save(tmp_path)
    with pytest.raises(ConfigError, match="of 'rental', not of 'bank'"):
        Identity.load(tmp_path, "bank")


def test_key_and_certificate_must_belong_together(rental, tmp_path):
    """A key beside another key's certificate is refused before it is used."""
    rental.save(tmp_path)
    Identity.create("rental", valid_days=1).save(tmp_path / "other")
    (tmp_path / "other" / "identity.pem").replace(tmp_path / "identity.pem")
    with pytest.raises(ConfigError, match="do not belong together"):
        Identity.load(tmp_path, "rental")


@pytest.mark.parametrize("name", ["identity.key", "identity.pem"])
def test_missing_and_broken_files_are_named(rental, tmp_path, name):
    """A missing or unreadable file is one clear line with its path."""
    rental.save(tmp_path)
    path = tmp_path / name
    path.write_text("no key at all")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"{name}: is not"):
        Identity.load(tmp_path, "rental")
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{name}: No such file"):
        Identity.load(tmp_path, "rental")


def test_signatures_bind_key_and_message(rental):
    """Another message, another key or an altered signature is refused."""
    signature = rental.sign(b"round 3")
    other = Identity.create("rental", valid_days=1)
    for identity, signed, message in (
        (rental.public_text, signature, b"round 4"),
        (other.public_text, signature, b"round 3"),
        (rental.public_text, bytes([signature[0] ^ 1]) + signature[1:], b"round 3"),
    ):
        with pytest.raises(AuthenticationError, match="was not made by"):
            verify(identity, signed, message)


def test_signatures_cannot_pass_for_those_of_another_protocol(rental):
    """The same key signs TLS handshakes: a signature of ours never verifies untagged."""
    with pytest.raises(InvalidSignature):
        rental.certificate.public_key().verify(rental.sign(b"message"), b"message")


@pytest.mark.parametrize(
    "text", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", "ed25519:*", "A" * 44]
)
def test_a_pin_that_is_no_key_is_refused(text):
    """Anything but the prefix and 32 bytes in base64 is a setting to be fixed."""
    with pytest.raises(ConfigError, match="public key in base64"):
        parse_public_text(text)


def test_certificates_hold_for_their_time_only(rental):
    """Before and after its time a certificate is refused, saying what to do; within it, not."""
    first = rental.certificate.not_valid_before_utc
    last = rental.certificate.not_valid_after_utc
    second = datetime.timedelta(seconds=1)
    check_validity("rental", rental.certificate, now=first + second)
    check_validity("rental", rental.certificate, now=last - second)
    with pytest.raises(ConfigError, match="set the clock"):
        check_validity("rental", rental.certificate, now=first - second)
    with pytest.raises(ConfigError, match=r"rental: its certificate expired .*, or set the clock"):
        check_validity("rental", rental.certificate, now=last + second)


def test_provision_makes_a_folder_for_each_party(tmp_path):
    """Each folder has its own key and everybody's certificates, and the pins match them."""
    pins = provision(["agency", "rental", "bank"], tmp_path, valid_days=1)
    assert len(set(pins.values())) == 3
    for name in pins:
        identity = Identity.load(tmp_path / name, name)
        assert identity.public_text == pins[name]
        assert {peer: public_text(c) for peer, c in identity.trusted.items()} == pins


def test_organisations_can_each_make_their_own_key(tmp_path):
    """One-party mode: after swapping certificates both ends pass the check of pins."""
    pins = {
        name: own_identity(name, tmp_path / name, valid_days=1).public_text
        for name in ("agency", "bank")
    }
    for own, peer in (("agency", "bank"), ("bank", "agency")):
        folder = tmp_path / own
        sent = tmp_path / peer / "identity.pem"
        with pytest.raises(ConfigError, match=f"has no certificate .*{peer}.pem"):
            check_pins(Identity.load(folder, own), pins, [peer])
        assert trust(folder, peer, sent) == pins[peer]
        check_pins(Identity.load(folder, own), pins, [peer])


def test_a_trusted_certificate_is_not_replaced_silently(tmp_path):
    """A second certificate under a trusted name is refused."""
    provision(["agency", "rental"], tmp_path, valid_days=1)
    own_identity("rental", tmp_path / "impostor", valid_days=1)
    with pytest.raises(ConfigError, match="another certificate of 'rental'"):
        trust(tmp_path / "agency", "rental", tmp_path / "impostor" / "identity.pem")


def test_pins_are_checked_before_anything_is_sent(tmp_path):
    """A missing pin, a wrong own pin, a wrong peer's pin and an expired certificate are told."""
    pins = provision(["agency", "rental"], tmp_path, valid_days=1)
    agency = Identity.load(tmp_path / "agency", "agency")
    check_pins(agency, pins, ["rental"])
    with pytest.raises(ConfigError, match="rental: the federation file pins no identity"):
        check_pins(agency, {"agency": pins["agency"]}, ["rental"])
    with pytest.raises(AuthenticationError, match="agency: its own identity is"):
        check_pins(agency, {**pins, "agency": pins["rental"]}, ["rental"])
    with pytest.raises(AuthenticationError, match="rental: its certificate in agency's trust"):
        check_pins(agency, {**pins, "rental": pins["agency"]}, ["rental"])
    # Made to last a tenth of a millisecond, it ended within the second in which it was made.
    old = Identity.create("rental", valid_days=1e-9)
    with pytest.raises(ConfigError, match=r"rental: its certificate expired .*, or set the clock"):
        check_pins(
            agency.trusting({"rental": old.certificate}),
            {**pins, "rental": old.public_text},
            ["rental"],
        )


def test_one_file_holds_a_whole_identity(tmp_path):
    """Key, certificate and trusted certificates in one text; it is checked like a folder."""
    provision(["agency", "rental"], tmp_path)
    identity = Identity.load(tmp_path / "agency", "agency")
    bundle = tmp_path / "agency.pem"
    bundle.touch(mode=0o600)
    bundle.write_bytes(identity.bundle())
    loaded = Identity.load(bundle, "agency")
    assert loaded.public_text == identity.public_text
    assert loaded.trusted == identity.trusted
    verify(identity.public_text, loaded.sign(b"text"), b"text")
    with pytest.raises(ConfigError, match="are not those of 'rental'"):
        Identity.load(bundle, "rental")
    bundle.write_bytes(identity.key_pem())
    with pytest.raises(ConfigError, match=r"agency\.pem: "):
        Identity.load(bundle, "agency")
    bundle.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load(bundle, "agency")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files that have no name")
def test_a_key_is_shown_to_tls_without_a_file(rental, monkeypatch):
    """A process that is killed meanwhile leaves nothing, not even an encrypted key."""

    def refused(*_given, **_more):
        raise AssertionError("a folder was made")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    rental = rental.trusting({"rental": rental.certificate})
    tls_context(rental, ["rental"], server=True)
