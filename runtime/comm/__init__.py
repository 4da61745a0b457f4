"""Collectives and messages between ranks, which are processes of torch.distributed."""
