"""Similarities under Paillier, and on secret shares of two helpers."""
