"""Sinks write logged values to TensorBoard, MLflow and Weights & Biases, beside the run's history.

Each sink is written by a process of its own (`process`), which rank 0's supervisor feeds (`feed`).
"""
