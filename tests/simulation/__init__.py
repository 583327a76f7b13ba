"""A gang on a simulated clock: coordinator, supervisors, workers, containers, disk, network, and the faults.

All of rolecall/gang is under test: the gang, what drives it, and the members. The rest are models: of the processes and
timers around them, the worker and what it writes, the locks, the rendezvous store, and TCP. `promises` says what must
hold; `schedule` the faults. Everything is drawn from one seed, so a schedule that breaks a promise can be run
again:

    python -m tests.simulation SEED

prints what happened in it; without SEED, and with --schedules and --seed, many are played (`make simulate`).
"""
