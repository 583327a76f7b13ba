"""Sinks write logged values to TensorBoard, MLflow and Weights & Biases, beside the run's history.

build         the sinks that SINKS names
points        a worker's records as items for sinks
feed          feeds the sinks from rank 0's supervisor, each in its own process
process       the process that writes one sink
tensorboard   TensorBoard's event files
held          base of the sinks that cannot take back a point: each waits for its checkpoint
mlflow        a run of MLflow
wandb         a run of Weights & Biases
"""
