"""Networks: the times of collectives over the links of GPUs, nodes and clusters."""
