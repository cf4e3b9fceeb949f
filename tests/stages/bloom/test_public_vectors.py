"""What other projects' tests hold as right, where our encodings coincide with theirs.

Coinciding: clkhash's bigrams, and anonlink's similarities of given bit vectors, which follow from
Hamming distances and counts of ones. Not coinciding, hence not compared: the places that a q-gram
sets. clkhash draws them from BLAKE2b slices of 16 bits with a salt, or by double hashing with HMACs
of SHA-1 and MD5; ours are slices of 32 bits, and fewer for longer texts, as FEDERAL balances them.
phe's example is in ``tests/stages/encrypted_linkage/test_paillier_distances.py``.
"""

import numpy as np
import pytest
from helpers.nearest import nearest_codes

from securevfl.stages.bloom.codes import occurrences, q_grams


def differing_bits(one: str, other: str) -> float:
    """Return the distance of two vectors that are written as digits."""
    codes = [
        np.packbits(np.array([list(vector.ljust(-(-len(vector) // 8) * 8, "0"))], dtype=np.uint8))
        for vector in (one, other)
    ]
    return float(nearest_codes(codes[0][None], codes[1][None], 1, backend="numpy").distances[0, 0])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("steve", [" s", "st", "te", "ev", "ve", "e "]),
        ("abab", [" a", "ab", "ba", "ab", "b "]),
    ],
)
def test_bigrams_are_clkhash_s(text: str, tokens: list[str]) -> None:
    """data61/clkhash, tests/test_tokenizer.py: test_bigram_1, test_bigram_duplicate."""
    assert q_grams(text, 2) == tokens


@pytest.mark.parametrize(
    ("text", "tokens"), [("1212", ["1", "2", "1", "2"]), ("1293", ["1", "2", "9", "3"])]
)
def test_unigrams_are_clkhash_s(text: str, tokens: list[str]) -> None:
    """data61/clkhash, tests/test_tokenizer.py: test_unigram_duplicate, test_unigram_1.

    Ours number equal ones afterwards, which clkhash does not.
    """
    assert q_grams(text, 1) == tokens
    assert len(set(occurrences(q_grams(text, 1)))) == len(tokens)


@pytest.mark.parametrize(
    ("one", "other", "similarity"),
    [
        ("0", "0", 1),
        ("0", "1", 0),
        ("1", "1", 1),
        ("00", "01", 0.5),
        ("00", "11", 0),
        ("01", "10", 0),
        ("01", "11", 0.5),
        ("10", "10", 1),
        ("11", "00", 0),
        ("11", "10", 0.5),
    ],
)
def test_hamming_similarities_are_anonlink_s(one: str, other: str, similarity: float) -> None:
    """data61/anonlink, tests/test_similarity_hamming.py: test_hamming_sim_k."""
    assert 1 - differing_bits(one, other) / len(one) == similarity


@pytest.mark.parametrize(
    ("one", "other", "dice"),
    [("1111011", "1111011", 1.0), ("0000100", "1111011", 0.0), ("1000001", "1111011", 0.5)],
)
def test_dice_coefficients_are_anonlink_s(one: str, other: str, dice: float) -> None:
    """data61/anonlink, tests/test_bloommatcher.py: test_dice_1 to test_dice_3.

    2 |A and B| = |A| + |B| - distance.
    """
    ones = one.count("1") + other.count("1")

    assert (ones - differing_bits(one, other)) / ones == dice


@pytest.mark.parametrize(
    ("one", "other", "tanimoto"),
    [("1111011", "1111011", 1.0), ("0000100", "1111011", 0.0), ("1000011", "1111011", 0.5)],
)
def test_tanimoto_coefficients_are_anonlink_s(one: str, other: str, tanimoto: float) -> None:
    """data61/anonlink, tests/test_bloommatcher.py: test_tanimoto_1 to test_tanimoto_3.

    2 |A or B| = |A| + |B| + distance.
    """
    ones, distance = one.count("1") + other.count("1"), differing_bits(one, other)

    assert (ones - distance) / (ones + distance) == tanimoto


@pytest.mark.parametrize("num_bytes", [8, 32, 64, 512, 1024])
def test_counts_of_ones_are_anonlink_s(num_bytes: int) -> None:
    """data61/anonlink, tests/test_popcount.py: every second bit of a vector is set."""
    assert differing_bits("10101010" * num_bytes, "0" * 8 * num_bytes) == 4 * num_bytes
