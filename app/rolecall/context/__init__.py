"""What a job's function is given, and what it calls."""
