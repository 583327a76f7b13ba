"""The rules of a worker's life, as scripts."""
