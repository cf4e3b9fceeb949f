"""Private set intersection of exact keys."""
