"""Checkpoints evaluated and exported."""
