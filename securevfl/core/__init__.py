"""securevfl.core."""
