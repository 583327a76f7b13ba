"""Who is in the gang, and which generation runs. Pure logic: no I/O, no clock.

admission.py   Admission: whether a generation may start, which members it has, and who waits for how long
budget.py      The restart budget: how many failures, and how many generations without progress, the job may have
directives.py  Directives: their epochs, and the short forms of what they say: names, and ranges of members
ending.py      The end of the job: when it is over, and which members do not know
gang.py        The gang: who is in, which generation runs, what each member must do
generation.py  The newest generation: its members, the ranks that it lost, and its drain
member.py      A member of a gang: when it starts, ends and fences its worker, what it reports, and when it exits
protocol.py    The messages between the members of a gang and its coordinator, and the gang's constants
requests.py    Members' requests, each answered as soon as its member's directive is another one
roster.py      The roster: which rank has which place, and which ranks are refused
"""
