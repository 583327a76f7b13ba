"""Sinks write logged values to TensorBoard, MLflow and Weights & Biases, beside the run's history.

build         the sinks that SINKS names
points        a worker's records as items for sinks
feed          feeds the sinks from rank 0's supervisor, each in its own process
process       the process that writes one sink
tensorboard   TensorBoard's event files
held          base of the sinks that cannot take back a point: each waits for its checkpoint
mlflow        a run of MLflow
wandb         a run of Weights & Biases

    build.py        Builds the sinks of a run from its settings
    feed.py         Feeds the sinks from rank 0's supervisor: a process for each sink gets new items once a second
    held.py         Base of the sinks that cannot take back a point
    mlflow.py       A run of MLflow, at MLFLOW_TRACKING_URI, by default in files in CHECKPOINT_DIR/mlflow
    points.py       A worker's records as items for sinks: of each curve one point a step
    process.py      `python -m rolecall.observe.sinks.process SINK`: writes one sink
    tensorboard.py  TensorBoard's event files in CHECKPOINT_DIR/tensorboard, by tensorboard's own writer
    wandb.py        A run of Weights & Biases, in CHECKPOINT_DIR/wandb, offline unless WANDB_MODE is set
"""
