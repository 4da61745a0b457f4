"""The work queues (lanes) of one device: streams of a GPU, or simulated streams on a CPU."""
