"""What the processes of the engine send each other, and the codec of it.

Heartbeats and answers, which the gang itself makes, are declared in gang/protocol.py.

codec.py    Encodes and decodes every message, as MessagePack or as a line of JSON
control.py  Requests to the control socket of `rolecall run`, and its replies
hosts.py    Between `rolecall run` and what it starts on a host
queries.py  Queries to ranks, and their replies
sinks.py    From rank 0's supervisor to a sink's process
tunnel.py   Between a tunnel and its supervisor or its worker
worker.py   Between a supervisor and its worker
"""
