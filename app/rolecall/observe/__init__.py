"""What others see of a run."""
