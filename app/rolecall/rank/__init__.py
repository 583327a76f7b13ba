"""One rank's life, from its process to its end.

start               a rank's processes on this machine: tunnel, supervisor
supervisor          the long-lived process: connects what follows
heartbeats, link    posts heartbeats to rank 0, and takes its directives
messages            heartbeats and answers as JSON
queries             typed queries of rank 0 to supervisors, and their replies
stats               the reply with statistics
stack_query         the reply with the worker's threads; threads watches them, stack_dump reads their stacks
tracing             the reply with recorded spans
coordinator         rank 0: runs the gang
run_files           rank 0: the run directory
collecting          rank 0: collects spans from all ranks
signed_queries      rank 0: queries from outside
site                rank 0: the page
endpoints, port     every rank: metrics and health at METRICS_PORT
worker_manager      carries out directives with one worker at a time
worker_process      the supervisor's handle on a worker
pipe_messages       the messages between a supervisor and its worker
supervisor_end      the supervisor's end of their pipe
worker_end          the worker's end of their pipe
worker              the process that runs a role's function
fork_server         the process that workers are forked from; adopting is its first import
zygote              the process that ranks of `rolecall run` are forked from; zygote_main is its first import
descendants         adopts and kills the processes below a process
guard               restarts a container's rank after a crash
disk_watch          warns of work on files that takes long
termination         the message for Kubernetes at a container's end
tasks               ends asyncio's tasks
"""
