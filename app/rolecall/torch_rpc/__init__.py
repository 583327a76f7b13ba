"""Programs that use torch.distributed.rpc.

rpc                 connects a generation's workers; calls with deadlines
agent               a worker's RPC agent, which connects to a peer at the first call
store               the store through which workers meet, in rank 0's worker
reach               announces a worker's addresses to its tunnel, and finds its peers'
failures            the errors of failed calls
late                the stacks of a peer that passed a call's deadline
turns               runs calls of `in_turn` functions on the main thread
tracing             calls and collectives as spans
limits              limits for modules that do not import torch
program             finds, checks and runs an unmodified program
adopt               its `init_rpc` and `init_process_group` in a generation
script_calls        its pending calls
"""
