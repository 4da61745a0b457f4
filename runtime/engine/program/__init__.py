"""The tasks of an iteration of one stage, in the order in which the host issues them."""
