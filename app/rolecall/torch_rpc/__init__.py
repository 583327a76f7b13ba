"""Everything that touches torch.distributed.rpc.

adopt.py         An unmodified program's `init_rpc` and `init_process_group` meet the members of this generation
agent.py         A worker's RPC agent, which connects to a peer at the first call between them
failures.py      Turns what torch raises for a failed call into one of three errors
late.py          Asks the peer of a call that has passed its deadline for its stacks, and logs them
limits.py        Limits of torch's RPC, for modules that do not import torch
program.py       Finds, checks and runs an unmodified program in a rank
reach.py         How a worker reaches its peers where their tunnels stand between
rpc.py           torch.distributed.rpc: connect a generation's workers, call with a deadline, count what is called
script_calls.py  The pending calls of a program that uses torch's RPC directly
store.py         The generation's store: where its workers meet, in rank 0's worker
tracing.py       Remote calls, waits for their answers, and collectives as spans of a trace
turns.py         Runs incoming calls of `in_turn` functions one at a time, in the main thread
"""
