"""One rank's processes and what they send each other: supervisor, coordinator, worker, fork server.

adopting.py        What the fork server imports first, and no other process
attaching.py       Makes a worker a part of generations, one at a time, and takes it out again
collecting.py      Rank 0's collector of traces: copies the files of all ranks to CHECKPOINT_DIR/trace
coordinator.py     The gang's coordinator, in rank 0's supervisor
debugging.py       `breakpoint()` in a worker: pdb at a socket in the run's folder
descendants.py     The processes below a process: adopts orphans, kills them all, and exits with a parent process
disk_watch.py      Warns if work on files, by this process or its worker, takes long: the disk is slow or hangs
endpoints.py       What a rank serves on METRICS_PORT: /metrics, /healthz (liveness) and /readyz
fork_server.py     The process that workers are forked from: it imports torch once, and never uses CUDA or RPC
guard.py           A container's first process restarts its rank after a crash
heartbeats.py      A member's heartbeats: posts them to rank 0, hands the answers to the member, and logs
port.py            Connections at METRICS_PORT, which anybody may open: how many there are at a time
queries.py         Queries of rank 0, or of clients, to the supervisors of all ranks, and their replies
run_files.py       CHECKPOINT_DIR as the coordinator uses it: its lock, the generation's number, DONE, FAILED
site.py            The page at rank 0's METRICS_PORT: what it shows now, as HTML, as JSON
stack_dump.py      The stacks of a worker's threads for the log: dumped by the worker itself, or read by py-spy
stack_query.py     A supervisor's reply to the query `ReadStacks`: the activity of each thread of its worker
start.py           A rank's processes on this machine: starts its tunnel, and runs its supervisor
stats.py           A supervisor's reply to the query `ReadStats`: counters and gauges of its worker
supervisor.py      The supervisor of a rank, which lives across generations and does not import torch
supervisor_end.py  The supervisor's end of the pipe to its worker (`worker_end.py` is the other)
tasks.py           The end of asyncio's tasks
termination.py     The message that Kubernetes keeps of an ended container: the cause in one line, then the rest
threads.py         Watches the threads of a process in /proc, which needs no privilege: which compute
tracing.py         A rank's part in traces: its supervisor starts a recording on request
worker.py          The worker: one process for each rank and generation, forked from one that has imported torch
worker_end.py      The worker's end of the pipe to its supervisor (`supervisor_end.py` is the other): reports
worker_manager.py  Carries out a member's actions: starts, loads, attaches, detaches, updates and ends its worker
worker_process.py  A supervisor's handle on its worker process: starts it, reads its messages, and ends it
zygote.py          The zygote of `rolecall run`: the standard library's fork server
zygote_main.py     The first import of the zygote; no other process imports it
"""
