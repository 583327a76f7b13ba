"""The cores of a whole run on a simulated clock: gang and members, workers' lives, links and calls.

All of rolecall/gang, rolecall/life and rolecall/links is under test, what decides whether a checkpoint may be written,
and who holds copies of it. The rest are models: of processes, forks, pipes, connections and timers, the meeting at rank
0's worker, what a worker does and writes, and the locks of the disk. `promises` says what must hold; `schedule` the
faults; `mutants` which broken rules are found. Everything is drawn from one seed, so a schedule that breaks a promise
can be run again:

    python -m tests.simulation SEED

prints what happened in it (`make simulate SEED=n`); without SEED, and with --schedules and --seed, many are played.
"""
