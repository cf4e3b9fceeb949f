"""securevfl.federation."""
