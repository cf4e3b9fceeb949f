"""Programs of the user's own that all parties run on secret shares."""
