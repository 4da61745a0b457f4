"""Networks: how long collectives take over the links of GPUs, nodes and clusters."""
