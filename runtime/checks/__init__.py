"""Proofs about the GPU path without a GPU: races of streams, hidden waits, hanging collectives."""
