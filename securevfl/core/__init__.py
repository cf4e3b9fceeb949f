"""Base of all other packages: errors, argument checks, seeds, files, progress."""
