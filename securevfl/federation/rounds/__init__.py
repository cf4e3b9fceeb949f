"""Rounds: representations are released, averaged and trained on."""
