"""Links to peers, and the calls that go by them. Pure logic, without time, threads or I/O; `wire/` is its driver.

| part | what it decides |
| --- | --- |
| links.py | `Links`: which peer is called by which connection, at which epoch; what a call waits for, and how it ends |
| calls.py | A call, its deadline, and the errors of one that is late |
| effects.py | What a driver is told to do |
| pool.py | `Pool`: which member is called with which item of a map, and in what order the answers are given out |

A link's states, for each peer that this member calls. A peer has an epoch, the number of its part in the generation
(`member_epoch`); a higher one replaces the part before, with its connections:

| state | what holds | moves on to |
| --- | --- | --- |
| absent | no call has needed it | connecting: a call, or `listen` |
| connecting | a connection is made, or what waits for it is sent | up: sent; absent: not connected, `forget`; lost |
| up | calls are sent at once, if there is room | lost: closed; absent: `forget`, or the peer has joined again |
| lost | calls to it fail, and it is refused, because of a problem | absent: the peer has joined again |

`lose` makes each state lost at an epoch, unless the peer is there at a later one. A connection attempt to an epoch that
is replaced is made anew, for the calls that wait. `end` ends all of it: what comes later fails.

A call's states:

| state | what holds | moves on to |
| --- | --- | --- |
| queued | too much is in flight to its peer: the caller waits | sent: the link is up, and has room; given up |
| linking | it waits for its link, and the caller does not | sent: connected; given up |
| sent | it is at the peer, or on its way | answered; examined: its deadline has passed; given up |
| examined | the peer is asked what it does | sent: it has more time; given up: it is late; answered |
| answered | it has a result | - |
| given up | it has failed, or nobody waits for it | - |
"""
