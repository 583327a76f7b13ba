"""Traces: what all ranks do, and what they wait for, on one time line."""
