"""Copies of rank 0's checkpoints, on the disks of members.

choice.py   Who holds copies, and which checkpoint a run goes on from
keeping.py  Rank 0's part: has members hold its checkpoints, and brings the newest back
store.py    A folder of checkpoints that come and go chunk by chunk, as peers call it
"""
