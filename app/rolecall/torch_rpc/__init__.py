"""Programs that use torch.distributed.rpc."""
