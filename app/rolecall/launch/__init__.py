"""The live display, and `rolecall run`, which starts the ranks that it shows."""
