"""The queues of work of one device: streams of a GPU, or simulated streams on a CPU."""
