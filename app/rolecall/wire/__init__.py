"""Calls between workers.

apart.py       Runs what may take long, or call the user's code, apart from threads that others wait for
calls.py       The wire of one worker, driven by `links/`: links to peers, calls that it makes, and that it carries out
clock.py       The time that deadlines of calls and steps run by
codec.py       Encodes values as pickle 5 with their large buffers beside it
connecting.py  Connections between workers: Unix sockets, TLS, or unencrypted
dispatch.py    Runs the calls that arrive: in the thread that read them, the main thread, or an event loop; their stacks
frames.py      Frames of a connection: a header, a pickle, and its large buffers
future.py      The answer of a call, as the caller sees it
link.py        A link to a peer: frames go out by one socket and come in by another
memory.py      Reads another process's memory, so that large buffers need not pass through a socket of one machine
messages.py    What frames carry: requests, and what a method raised
readers.py     The threads that read a worker's links and run what arrives
serial.py      Calls that run one at a time, in the order in which they came
session.py     A worker's part in a generation, as its calls see it: what belongs to it ends with it
tracing.py     Calls as spans of a trace, at both ends
"""
