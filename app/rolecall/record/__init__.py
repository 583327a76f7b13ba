"""What a run records: history, spans, calls under way, and the layout of its directory.

disk.py           Disk work beside an event loop, in one thread, in order
files.py          Names of a run's report, files written as a whole, and the work on files under way
history.py        A run's history: score and its spread, loss and work done over the seconds of training
journal.py        Writes a run's history to its file, in rank 0's supervisor
pending_calls.py  The pending calls of a worker, which its heartbeats report to its supervisor
recorder.py       Records the activity of a worker in a file; `records` describes its lines
records.py        The records of a trace, as JSON arrays, one a line: a process, then its spans
rundir.py         The files beside a run's checkpoints: the newest generation's number, DONE, FAILED
span_file.py      The file of a worker's spans, of a bounded size; a rank's folder has the newest few
stacks.py         Threads and their frames in a reply to the query "stacks": what a thread does and waits for
"""
