"""Calls between workers.

calls.py       The wire of one worker: its links to peers, the calls that it makes, and those that it carries out
codec.py       Encodes values as pickle 5 with their large buffers beside it
connecting.py  Connections between workers: Unix sockets, TLS, or unencrypted
deadlines.py   Ends calls that are late, and logs the stacks of their peers
dispatch.py    Runs the calls that arrive: in the thread that read them, the main thread, or an event loop; their stacks
frames.py      Frames of a connection: a header, a pickle, and its large buffers
future.py      The answer of a call, as the caller sees it
link.py        A link to a peer: frames go out by one socket and come in by another; what waits for one, or an answer
memory.py      Reads another process's memory, so that large buffers need not pass through a socket of one machine
messages.py    What frames carry: requests, and what a method raised
readers.py     The threads that read a connection and run what arrives
session.py     A worker's part in a generation, as its calls see it: what belongs to it ends with it
tracing.py     Calls as spans of a trace, at both ends
"""
