"""Checkpoints: snapshots and shards, and their files.

capture.py         A consistent copy of tensors while they change: copy-on-write, read block by block
checkpoint.py      Checkpoints: atomic, checksummed snapshots, ordered by (generation, step)
logged.py          A share whose checkpoints hold what changed: a base, which has all rows
saving.py          Writes rank 0's checkpoints
shard_messages.py  Messages between rank 0 and the ranks that hold shares of a value
sharded.py         Rank 0's handle on a value that the members of a role hold: they capture
shardfile.py       A shard's file: safetensors, written and read in blocks, hashed (XXH3-128) on the way
shardfiles.py      Reads the files of a share into tensors, and links them into later checkpoints
shards.py          A rank's share of a sharded value: captures, writes and reads it
"""
