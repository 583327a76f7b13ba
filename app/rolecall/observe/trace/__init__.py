"""The spans of all ranks on one time line.

calls.py     Both sides of each remote call, and the parts of its time
command.py   `rolecall trace`: the activity and the waits of all ranks, as one file for Perfetto, or as a table
copies.py    Copies of the ranks' files, which grow as rank 0 or `rolecall trace` asks for what follows
otlp.py      Exports the spans of all ranks from rank 0 by OpenTelemetry's SDK
perfetto.py  A trace as one file for Perfetto and chrome://tracing
summary.py   The time of a job's steps in tables: the activity of each rank, and its waits for others
"""
