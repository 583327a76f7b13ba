"""Imported by patient.py, as its neighbour."""

ANSWER = 21
