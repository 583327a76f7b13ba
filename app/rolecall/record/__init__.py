"""What a run records: history, spans, calls under way, and the layout of its directory.

clock.py          The clocks of the ranks' machines on one time line: rank 0 asks each rank for its time
files.py          Names of a run's report, files written as a whole, and the work on files, beside an event loop too
history.py        A run's history: what its job logs, and what happens to it; rank 0's supervisor appends it to a file
pending_calls.py  The pending calls of a worker, which its heartbeats report to its supervisor
recorder.py       Records the activity of a worker in a file of bounded size; `records` describes its lines
records.py        The records of a trace: JSON arrays, one a line
rundir.py         The files beside a run's checkpoints: the newest generation's number, DONE, FAILED
"""
