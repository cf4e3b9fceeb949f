"""securevfl.cli."""
