"""What securevfl's building blocks cost, measured between real processes."""
