"""Write logged values to TensorBoard, MLflow and Weights & Biases, each in a process of its own.

build.py        Builds the sinks of a run from its settings
feed.py         The sinks at rank 0's supervisor: a process each, which reads the run's history
mlflow.py       A run of MLflow, at MLFLOW_TRACKING_URI, by default in files in CHECKPOINT_DIR/mlflow
once.py         Base of the sinks that cannot take back a point
process.py      `python -m rolecall.observe.sinks.process SINK`: writes one sink, from the run's history as it grows
tensorboard.py  TensorBoard's event files in CHECKPOINT_DIR/tensorboard, by tensorboard's own writer
wandb.py        A run of Weights & Biases, in CHECKPOINT_DIR/wandb, offline unless WANDB_MODE is set
"""
