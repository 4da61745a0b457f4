"""The queues of work of one device: a GPU's own, or simulated ones that look for races."""
