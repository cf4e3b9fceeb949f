"""securevfl.report."""
