"""What the author of a job declares, and how it is found."""
