"""Linking under Paillier encryption gives the plain links, and answers tell nothing else."""

from itertools import repeat

import numpy as np
import pytest

pytest.importorskip("phe", reason="phe is an optional dependency")

from helpers.nearest import nearest_records
from phe import paillier

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.cores import on_cores
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.stages.encrypted_linkage.block_search import links_from_shares
from securevfl.stages.encrypted_linkage.homomorphic import (
    Keyholder,
    Lanes,
    masked_distances,
    obfuscators,
)


@pytest.fixture(scope="module")
def keyholder() -> Keyholder:
    """One short key for all tests of this file: making keys takes longest."""
    return Keyholder(bits=512, insecure_short_key=True)


@pytest.mark.parametrize("key_dim", [1, 2, 3])
@pytest.mark.parametrize("extreme", [False, True])
def test_links_equal_the_unprotected_ones(
    keyholder: Keyholder, key_dim: int, extreme: bool
) -> None:
    """To the last bit, over several packs of which the last is not full, corners included."""
    rng = np.random.default_rng(key_dim)
    rows, records = (rng.integers(0, LARGEST_UNIT + 1, size=(count, key_dim)) for count in (17, 25))
    if extreme:
        rows, records = LARGEST_UNIT * (rows % 2), LARGEST_UNIT * (records % 2)
    packed = keyholder.encrypt([rows])[0]
    fresh = obfuscators(keyholder.modulus, len(packed.packs) * len(records))
    ((answers, theirs),) = masked_distances([(packed, records)], fresh)
    (ours,) = keyholder.share([(rows, answers)])
    links = links_from_shares(ours, theirs, 4, key_dim=key_dim)
    plain = nearest_records(rows.astype(np.float64), records.astype(np.float64), 4)

    assert len(packed.packs) > 1
    assert np.array_equal(links.indices, plain.indices)
    assert np.array_equal(links.distances, plain.distances)


def test_all_steps_run_on_several_cores(keyholder: Keyholder) -> None:
    """The same shares as by one, of blocks of unlike sizes, with progress that ends."""
    rng = np.random.default_rng(3)
    sizes = [(9, 40), (1, 1), (14, 33)]
    rows, records = (
        [rng.integers(0, LARGEST_UNIT + 1, (size[side], 2)) for size in sizes] for side in (0, 1)
    )
    fresh = obfuscators(keyholder.modulus, 200)
    told: list[tuple[int, int]] = []
    with on_cores(2, after=1) as apply:
        packed = keyholder.encrypt(rows, apply=apply)
        found = masked_distances(list(zip(packed, records, strict=True)), fresh, apply=apply)
        asked = [(own, answers) for own, (answers, _) in zip(rows, found, strict=True)]
        shares = keyholder.share(asked, apply=apply, progress=lambda *now: told.append(now))

    for own, others, one, (_, other) in zip(rows, records, shares, found, strict=True):
        squared = ((own[:, None] - others[None]) ** 2).sum(axis=2)
        assert np.array_equal(one + other, squared.astype(np.uint64))
    for one, again in zip(shares, keyholder.share(asked), strict=True):
        assert np.array_equal(one, again)
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]


def test_27_rows_share_a_ciphertext_at_2048_bits() -> None:
    """At two dimensions a lane has 75 bits: 34 of a value, 40 that hide it, 1 for the carry."""
    lanes = Lanes(key_dim=2, key_bits=2048)

    assert (lanes.width, lanes.count) == (75, 27)
    largest = 2 * lanes.offset + 2**lanes.mask_bits - 1
    assert largest < 2**lanes.width
    assert lanes.count * lanes.width < 2048


def recovered(keyholder: Keyholder, ciphertext: int, answer: int) -> list[int]:
    """Try all coordinates, as a key holder can that looks at randomness alone.

    Modulo n a ciphertext is its randomness to the n-th power, whatever it encrypts; the answer's is
    the primary's own to the power of the coordinate, unless it was made fresh.
    """
    n = keyholder.modulus
    own, power, found = ciphertext % n, 1, []
    for coordinate in range(LARGEST_UNIT + 1):
        if power == answer % n:
            found.append(coordinate)
        power = power * own % n
    return found


def test_a_key_holder_recovers_a_record_from_stale_ciphertexts_only(keyholder: Keyholder) -> None:
    """Without fresh obfuscators the attack finds the coordinate; with them it finds none."""
    rows, records = np.array([[1234]]), np.array([[54321]])
    packed = keyholder.encrypt([rows])[0]
    ((stale, _),) = masked_distances([(packed, records)], repeat(1))
    ((fresh, _),) = masked_distances([(packed, records)], obfuscators(keyholder.modulus, 1))

    assert recovered(keyholder, packed.packs[0][0], stale[0][0]) == [54321]
    assert recovered(keyholder, packed.packs[0][0], fresh[0][0]) == []


def test_every_ciphertext_needs_an_obfuscator(keyholder: Keyholder) -> None:
    """Running out of them is an error, not a stale ciphertext; and no two are equal."""
    packed = keyholder.encrypt([np.array([[1, 2]])])[0]
    records = np.zeros((3, 2), dtype=np.int64)

    with pytest.raises(DataError, match="obfuscators ran out"):
        masked_distances([(packed, records)], obfuscators(packed.modulus, 2))
    assert len(set(obfuscators(packed.modulus, 20))) == 20


def test_masks_are_fresh_for_every_lane(keyholder: Keyholder) -> None:
    """Two answers to one question have unrelated shares."""
    rows, records = np.zeros((5, 2), dtype=np.int64), np.zeros((3, 2), dtype=np.int64)
    packed = keyholder.encrypt([rows])[0]
    one, other = (
        masked_distances([(packed, records)], obfuscators(packed.modulus, 9))[0][1]
        for _ in range(2)
    )

    assert len(set(np.concatenate([one, other]).ravel().tolist())) == 30


def test_short_keys_are_refused() -> None:
    """2048 bits at least, outside tests."""
    with pytest.raises(ConfigError, match="bits must be at least 2048, got 1024"):
        Keyholder(bits=1024)


def test_bad_keys_are_refused(keyholder: Keyholder) -> None:
    """Not quantised, empty, or of another dimension."""
    with pytest.raises(DataError, match="whole numbers of 0 to 65535"):
        keyholder.encrypt([np.array([[LARGEST_UNIT + 1]])])
    with pytest.raises(DataError, match="at least one"):
        keyholder.encrypt([np.empty((0, 2), dtype=np.int64)])


def test_nothing_secret_is_shown(keyholder: Keyholder) -> None:
    """Texts hold sizes only."""
    assert repr(keyholder) == "Keyholder(512 bits)"
    assert repr(keyholder.encrypt([np.array([[1, 2]])])[0]) == "PackedRows(1 rows in 1 packs)"


def test_phe_s_own_example_holds() -> None:
    """data61/python-paillier, phe/tests/paillier_test.py, testEncryptDecryptRegression0.

    By phe itself, and by the two factors that :mod:`paillier_distances` multiplies.
    """
    n, m, r = 126869, 10100, 74384

    assert paillier.PaillierPublicKey(n).raw_encrypt(m, r) == 935906717
    assert (1 + n * m) * pow(r, n, n**2) % n**2 == 935906717


def test_phe_shows_exponents_of_other_numbers_and_ours_are_whole(keyholder: Keyholder) -> None:
    """A float's exponent stands beside its ciphertext; our ciphertexts stand alone."""
    public, _ = paillier.generate_paillier_keypair(n_length=512)
    shown = [public.encrypt(value).exponent for value in (3.0, 0.125, 1e-9, 1e6)]
    packed = keyholder.encrypt([np.array([[3], [60_000]])])[0]

    assert len(set(shown)) > 2
    assert all(type(ciphertext) is int for pack in packed.packs for ciphertext in pack)
