"""All ranks of a job as threads of one process: for breakpoints, coverage, and tests.

network.py   Connects the workers of a generation by pairs of sockets
process.py   What all ranks share of their process: its settings for one run, and the debugger's terminal
rank.py      A rank without a process: its supervisor, and the coordinator, without HTTP and tunnel
run.py       One run: its ranks, `kill`, `scale` and `drain`
threads.py   The threads of one worker, which end together
worker.py    A worker as threads, in the place of its process
"""
