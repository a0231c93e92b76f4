"""Share kernel code."""
