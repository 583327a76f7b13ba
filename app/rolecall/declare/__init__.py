"""What an author declares, and how it is found and checked, without torch.

describe.py   What a process without torch knows of a job: its roles, its settings, its labels
flags.py      The flags of `rolecall run JOB`: every setting is one
loader.py     Loads a user's file or module, and says where in it an error lies
plain.py      Which values a checkpoint can hold
preflight.py  What the text of a user's file tells before anything starts: calls that no peer could answer
registry.py   The names of jobs, and the rank of a process
remote.py     Which functions peers can call: checked before a job starts, at the caller, and at the peer
sources.py    The source of a user's job as it was when its rank, or `rolecall run`, started
spec.py       What the author of a job declares: its roles, its settings, its metrics
task.py       What a worker is started with, and the errors that end its function
"""
