"""securevfl.launch."""
