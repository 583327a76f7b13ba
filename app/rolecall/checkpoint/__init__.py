"""Snapshots and shards, and their files."""
