"""The jobs that ship with Rolecall: they import its public API, `support` and their own folder.

support.py  What the jobs of Rolecall share, and no job of a user's needs: progress, a disk cache, devices
hybrid/     A large embedding table on servers, a dense network replicated on trainers by DistributedDataParallel
ps/         Parameter server: trainers compute gradients, servers hold the parameters and update them
rl/         Reinforcement learning: an agent (rank 0) learns from observers that step gymnasium environments
rnn/        A word language model split over two ranks: the `ps` holds the embedding and the decoder
script/     An unmodified torch.distributed.rpc program: every rank runs the same file
"""
