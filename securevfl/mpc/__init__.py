"""securevfl.mpc."""
