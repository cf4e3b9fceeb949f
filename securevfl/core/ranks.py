"""Ranks, by which parties name one another: the primary's is 0, secondaries count up from 1."""

from typing import Final

PRIMARY_RANK: Final = 0
