"""Collectives between ranks, which are processes of torch.distributed."""
