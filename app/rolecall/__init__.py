"""Rolecall: torch.distributed.rpc training as containers, one image whose role is chosen by environment variables."""
