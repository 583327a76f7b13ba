"""Traces and stacks: the activity of all ranks, and what they wait for.

recorder, span_file   spans of this process, and the file that they are written to
records               the files of a trace, read back
calls, clocks         both sides of each call; the ranks' clocks on one time line
perfetto              a trace as one file for Perfetto
timeline, summary     a trace as tables
otlp                  spans exported by OpenTelemetry's protocol
stacks                threads and their frames
deadlocks             who waits for whom, from stacks and pending calls
stack_report          stacks as text
"""
