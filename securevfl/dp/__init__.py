"""securevfl.dp."""
