"""Reports on a GPU or a node: the measured times and memory of plans, beside their predictions."""
