"""The optional parts of a run, each whole in its folder."""
