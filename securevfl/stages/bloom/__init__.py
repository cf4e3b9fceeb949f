"""Keyed hashes and Bloom filters of text keys."""
