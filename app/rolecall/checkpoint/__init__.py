"""Checkpoints: snapshots and shards, and their files.

capture.py     A consistent copy of tensors while they change: copy-on-write, read block by block
checkpoint.py  Checkpoints: atomic, checksummed snapshots, ordered by (generation, step)
kept.py        State that members keep in rank 0's checkpoints: each packs its own, and writes it as a share
logged.py      A share whose checkpoints hold what changed: a base, which has all rows
saving.py      Writes rank 0's checkpoints
sharded.py     Rank 0's handle on a value that the members of a role hold: they capture, write and read their shares
shardfile.py   The files of shares: safetensors, written and read in blocks, hashed, and linked into later checkpoints
shards.py      A rank's share of a sharded value: captures, writes and reads it
"""
