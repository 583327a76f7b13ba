"""Where logged values go besides the run's history: TensorBoard, MLflow, Weights & Biases.

Each sink is written by a process of its own (`process`), which rank 0's supervisor feeds (`feed`).
"""
