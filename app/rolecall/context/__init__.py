"""What a role's function is given.

context             one object, which delegates to these parts
group               the rank, its peers, and calls to them
training            steps and checkpoints of rank 0
progress            metrics, history, log lines, time left
progress_bar        the progress of long work
watchdog            detects a stuck worker
eager               optimizers and DistributedDataParallel without torch's compiler
memory              keeps freed memory in the process
"""
