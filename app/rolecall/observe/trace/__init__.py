"""Traces: the activity of all ranks, and what they wait for.

command               `rolecall trace`
calls, clocks         both sides of each call; the ranks' clocks on one time line
perfetto              a trace as one file for Perfetto
summary               a trace as tables
otlp                  spans exported by OpenTelemetry's protocol
"""
