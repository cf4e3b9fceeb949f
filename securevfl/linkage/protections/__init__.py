"""Protections of the linking stage: who compares keys, and what each party learns of them."""
