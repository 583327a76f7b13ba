"""`rolecall stacks`: the stacks of all ranks, who waits for whom, deadlocks.

command.py       `rolecall stacks`: the stacks of all ranks' workers, and who waits for whom
deadlocks.py     Who waits for whom, from the stacks and the pending calls of all ranks
stack_report.py  The replies to the query "stacks" as text: the activity of each rank's threads
threads.py       A rank's reply to the query `ReadStacks`: its worker's threads with their frames
"""
