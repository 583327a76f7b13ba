"""The files of a run, beside its checkpoints.

rundir          the run directory: its files and how they are set aside
files           files written as a whole; the work on files under way
disk            a thread for disk work beside an event loop
history         score, loss and work done over time; read and reduced
journal         writes the history's file
recorder        spans of this process
span_file       the file that they are written to
records         the files of a trace, read back
pending_calls   calls that a worker waits for
stacks          threads and frames
"""
