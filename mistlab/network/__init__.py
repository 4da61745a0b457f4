"""Networks: the times of collectives and messages over the links of GPUs, nodes and clusters."""
