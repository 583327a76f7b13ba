"""Slow links between ranks on one machine: each rank has a network namespace of its own, with one link that leads to
all others.

`python -m bench.link --check` measures each link of LINKS against what it promises. Links are emulated in
one of two ways (network.py): a router in user space between TUN devices, or the kernel's token bucket filter where a
process could not keep up. Both need root and the program `ip`.
"""
