"""`rolecall run`: all ranks of a job on this machine, and commands for them; `rolecall launch`: on a cluster.

commands.py      `rolecall ps`, `kill` and `scale`: commands for a local run, which they reach by its control socket
control.py       The control socket of `rolecall run`: other commands list its ranks there
gpu.py           GPUs for the ranks of `rolecall run`
local.py         All ranks of a job as processes on this machine: `rolecall run JOB`
output.py        What `rolecall run` prints, by a thread of its own: a terminal that is slow
rank_process.py  A rank of `rolecall run`: its process, which is restarted when it crashes, and its log
slurm.py         `rolecall launch slurm JOB`: writes the batch script of a job and submits it
"""
