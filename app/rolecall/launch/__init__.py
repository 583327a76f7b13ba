"""`rolecall run`, and the commands for a local run.

local               all ranks of a job as processes on this machine
rank_process        one rank's process: starts it, restarts it
output              the ranks' output, in log files and on the terminal
control             the control socket of a local run
commands            `rolecall ps`, `kill` and `scale`
gpu                 shares this machine's GPUs among ranks
"""
