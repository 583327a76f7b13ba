"""One rank's life."""
