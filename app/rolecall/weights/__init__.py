"""Published weights: versions in chunks, which readers pull from whoever has them.

copies.py     The versions of each name that this process holds, complete or on their way
exchange.py   Keeps a process's copies of a name up to date: tells rank 0 what is here, and pulls what is newer
manifest.py   What a version consists of: its identity, its tensors in one buffer, and its chunks' digests
packing.py    Float tensors as integers of 8 or 4 bits, in blocks that share a scale
plan.py       PURE: which chunk is asked of whom, and what follows if one is slow, lost or does not have it
registry.py   At rank 0: the newest version of each name, who has all of it, and who waits for it
"""
