"""The largest sizes that models, nodes and runs may have: far above any real one.

Whoever gives more has mistaken a unit or a column, and what follows from such sizes takes hours or
overflows (docs/decisions/0052). The largest published: 128 blocks, hidden 25,600, heads 160, 2,048
experts, a vocabulary of 262,144, sequences of 10 million tokens, 100,000 GPUs.
"""

MOST_LAYERS = 10_000
MOST_HEADS = 2**16
MOST_HIDDEN = 2**20
# Of a feed-forward network, or of a head.
MOST_WIDTH = 2**24
MOST_VOCAB = 2**27
MOST_EXPERTS = 2**16
# Tokens of a sequence, or sequences of a step.
MOST_TOKENS = 10**9
MOST_NODES = 10**6
MOST_GPUS_OF_NODE = 10_000
# Of a measured quantity in the unit of its field, such as GiB, GB/s or microseconds.
LEAST_QUANTITY = 1e-9
MOST_QUANTITY = 1e9
# Rates of operators are fitted: one that memory alone limits has a rate of arithmetic without end.
MOST_RATE = 1e30
