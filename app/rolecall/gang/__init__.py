"""Who is in the gang, and which generation runs. Pure logic: no I/O, no clock.

- `protocol`: the messages between members and coordinator, events, effects, and constants
- `gang`: the coordinator's state machine, composed of the parts below
- `roster`: which rank has which place, and which ranks are refused
- `admission`: whether a generation may start, and with which members; backoff
- `budget`: how many failures, and how many generations without progress, the job may have
- `generation`: the newest generation: its members, its losses, its drain
- `directives`: the epochs that number directives
- `compact`: short forms of messages: names of what the other side has, ranges of members
- `member`: one rank's side: starts, ends and fences its worker, reports, exits
"""
