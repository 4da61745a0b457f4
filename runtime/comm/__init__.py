"""Collectives between ranks: processes of torch.distributed, or threads of one process."""
