"""The jobs that ship with Rolecall; each imports the public API, its own folder and `support`.

- `hybrid`: an embedding table on servers, a dense network under DistributedDataParallel on trainers
- `ps`: parameter servers
- `rl`: reinforcement learning, an agent and observers
- `rnn`: a language model that is split over two ranks
- `script`: an unmodified torch RPC program
- `support`: helpers that the jobs share
"""
