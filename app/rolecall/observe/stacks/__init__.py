"""The stacks of all ranks, and who waits for whom.

deadlocks      who waits for whom, from stacks and pending calls
stack_report   stacks as text
command        `rolecall stacks`
"""
