"""`rolecall doctor`: checks what a rank needs, and says for each fault what to do.

checks      what a check is, how it is run, helpers
subject     the rank that is examined, from the environment
rank0       requests to rank 0 as this rank would make them
network     name, route and ports
membership  token, certificates, TLS handshake
common      what this rank and rank 0 must agree on
files       CHECKPOINT_DIR, TMPDIR, shared memory
machine     limits, memory, GPU
diagnosis   rank 0's answer: versions, clock, agreed settings
command     the command line and the report
"""
