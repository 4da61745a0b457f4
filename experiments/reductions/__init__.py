"""Studies of data parallelism with reduced communication: cost and accuracy."""
