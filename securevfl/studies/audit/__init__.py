"""Real rounds of the installed code, tested against what they promise."""
