"""Secure sums: fixed-point words, masks that cancel, and CrypTen's reveal to the primary."""
