"""Who is in the gang, and which generation runs. Pure logic: no I/O, no clock.

admission.py   Admission: whether a generation may start, which members it has, and who waits for how long
budget.py      The restart budget: how many failures, and how many generations without progress, the job may have
directives.py  Directives: their epochs, and the short forms of what they say: names, and ranges of members
gang.py        The gang: who is in, which generation runs, what each member must do
generation.py  The newest generation: its members, the ranks that it lost, and its drain
member.py      A member of a gang: when it starts, ends and fences its worker, what it reports, and when it exits
protocol.py    The messages between the members of a gang and its coordinator, and the gang's constants
roster.py      The roster: which rank has which place, and which ranks are refused
"""
