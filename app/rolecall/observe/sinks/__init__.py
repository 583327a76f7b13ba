"""Write logged values to TensorBoard, MLflow and Weights & Biases, each in a process of its own.

build.py        Builds the sinks of a run from its settings
feed.py         Feeds the sinks from rank 0's supervisor: a process for each sink gets new items once a second
mlflow.py       A run of MLflow, at MLFLOW_TRACKING_URI, by default in files in CHECKPOINT_DIR/mlflow
once.py         Base of the sinks that cannot take back a point
points.py       A worker's records as items for sinks: of each curve one point a step
process.py      `python -m rolecall.observe.sinks.process SINK`: writes one sink
tensorboard.py  TensorBoard's event files in CHECKPOINT_DIR/tensorboard, by tensorboard's own writer
wandb.py        A run of Weights & Biases, in CHECKPOINT_DIR/wandb, offline unless WANDB_MODE is set
"""
