"""Scripts of links and calls."""
