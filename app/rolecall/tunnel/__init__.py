"""One TLS port a rank: what ranks send each other passes through it, for members only."""
