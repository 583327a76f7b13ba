"""The stacks of all ranks, and who waits for whom."""
