"""A worker's life. Pure logic, without time, threads or I/O. Each event of a rank, and of a worker's own side, returns
one `Batch` of what is to be done.

| part | what it decides |
| --- | --- |
| process.py | `WorkerLife`: one worker process, as its supervisor sees it |
| workers.py | `RankWorkers`: a rank's worker, its spares and its check of the settings, as its `Member` orders |
| parts.py | `WorkerParts`: the worker's own side: the generations that it is a part of, one after the other |

A worker's states, and what moves it on; a message in capitals is sent by the supervisor, the others by the worker:

| state | what holds | moves on to |
| --- | --- | --- |
| none | the rank has no worker | loading, joining: it is forked |
| loading | it makes its role's object, or checks the settings | ready: loaded; joining: ATTACH |
| ready | it has no generation; a spare stays here until it takes a worker's place | joining: ATTACH |
| joining | it meets the workers of its generation | running: connected; draining: connected after DRAIN |
| running | it takes part in the generation | draining: DRAIN; leaving: DETACH; ready: detached (a peer was lost) |
| draining | it writes the last checkpoint | running: drain refused; leaving: DETACH; ended: result |
| leaving | it leaves its generation, and is killed if it does not by a deadline | ready: detached; joining: ATTACH |
| ended | its process has ended, with an outcome | - |

Every state but none moves on to ended, by a result, a kill, or a crash. A worker of a role that does not stay has no
ready after joining: DETACH ends it. A check of the settings is loading until it has ended.
"""
