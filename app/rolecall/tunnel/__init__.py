"""One TLS port a rank, through which everything between ranks passes.

acceptor.py    Accepts TLS on the rank's port: authenticates within DEADLINE_SECONDS, reads the requested service
client.py      A worker's requests to its rank's tunnel
channel.py     One TLS connection to a peer's tunnel, on a non-blocking socket, and the frames in it
dial.py        Connects to a peer's tunnel, authenticates it, and requests a service
handle.py      Starts the tunnel's process, sends it the rank's member name, and receives its figures
keys.py        Certificates for TLS between ranks: made from JOB_TOKEN, or a user's own
listening.py   Listens on PORT, or on the port after it, where rank 0's worker is reached with TLS=off
local.py       Serves the tunnel's own rank, over a Unix socket that only the rank's user can open
loop.py        The tunnel's event loop, on epoll
peek.py        Reads the fingerprint in the certificate that is presented at a port, whoever signed it
places.py      Names of the services and sockets of tunnels
process.py     The tunnel's process: one a rank, beside its supervisor and its worker; it ends with the supervisor
rank0.py       A rank's requests to the coordinator: heartbeats, replies to queries, and those of `rolecall doctor`
relay.py       Relays between a local connection and one to a peer: data that arrives at one end is sent at the other
signatures.py  Requests that are signed with a key derived from JOB_TOKEN
tickets.py     Tickets, with which a peer's second connection to PORT reaches this rank's worker
"""
