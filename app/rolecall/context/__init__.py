"""What a role's function is given.

calls.py         Calls of peers' methods: to one, to all of a role, to the least loaded of a role
context.py       What a role's function is given: calls, training, and the rest of a rank's generation
eager.py         Optimizers and DistributedDataParallel without torch's compiler
gradients.py     Gradients across calls, at the member that calls: each answer is a node of its autograd graph
group.py         A rank's group: who it is, who its peers are, and calls to them
mapping.py       A map over the members of a role: `links.Pool` decides, and this calls, waits and reads the items
meeting.py       The workers of a generation meet: each connects to rank 0's, and learns where the others are
memory.py        Keeps freed memory in the process
passes.py        What a member keeps for gradients that cross calls: forward passes, parameters' gradients, optimizers
progress.py      How far training has come: metrics, the run's history, log lines, and the time left
progress_bar.py  Progress of long work: a bar of rich on a terminal, elsewhere a log line every LOG_SECONDS
queues.py        Bounded queues between ranks
services.py      What each worker does for its peers, whatever its role
shared.py        Arguments that all calls of a map share: each member gets them once
training.py      What a context does for training: where it resumes, its steps and log, its checkpoints, its end
transport.py     What carries a group's calls: the wire, with each call counted, timed, watched and traced
watchdog.py      Detects a worker that is stuck: in a phase, in a step, or before its training starts
weights.py       Weights that one member publishes and others subscribe to, as a job sees them
"""
