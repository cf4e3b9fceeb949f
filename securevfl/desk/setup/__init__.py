"""Before a first run: a federation file proposed from tables, and checked."""
