"""Everything that touches torch.distributed.

adopt.py         An unmodified program's `init_rpc` and `init_process_group` meet the members of this generation
distributed.py   Connects a worker to its generation: by the wire and, if it is needed, by torch's store and groups
failures.py      Tells by its text whether what torch raised means that a peer is gone
program.py       Finds, checks and runs an unmodified program in a rank
reach.py         How a worker reaches its peers where their tunnels stand between
script_calls.py  The pending calls of a program that uses torch's RPC directly
store.py         The generation's store: where its workers meet, in rank 0's worker
tracing.py       Torch's collectives as spans of a worker's trace
"""
