"""`rolecall doctor`: checks what a rank needs, and says what to do about each fault.

checks.py      What a check is, how it is run within a deadline, and helpers that checks share
command.py     `rolecall doctor [JOB]`: runs the checks of the rank that the environment describes, and reports them
common.py      Checks of what this rank and rank 0 must agree on: credentials, the state of the gang, settings, clocks
diagnosis.py   Rank 0's answer to `rolecall doctor`, by the channel of heartbeats: versions, clock
files.py       Checks of directories
machine.py     Checks of the machine, or of the container's cgroup: open files, processes, memory
network.py     Checks of the network: rank 0's name, rank 0's port, this rank's own ports
rank0.py       Requests to rank 0 as this rank's supervisor would make them
subject.py     The rank that is examined, as the environment of this process describes it
"""
