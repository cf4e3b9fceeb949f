"""What is done with many runs, or with parts of one: comparisons, linkage alone, audits."""
