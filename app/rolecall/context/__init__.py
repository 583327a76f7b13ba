"""What a role's function is given.

context.py       What a role's function is given: one object that delegates to the parts of a rank's generation
eager.py         Optimizers and DistributedDataParallel without torch's compiler
group.py         A rank's group: who it is, who its peers are, and calls to them
memory.py        Keeps freed memory in the process
progress.py      How far training has come: metrics, the run's history, log lines, and the time left
progress_bar.py  Progress of long work: a bar of rich on a terminal, elsewhere a log line every LOG_SECONDS
training.py      Rank 0's steps and checkpoints: where training resumes, when a checkpoint is due
watchdog.py      Detects a worker that is stuck: in a phase, in a step, or before its training starts
"""
