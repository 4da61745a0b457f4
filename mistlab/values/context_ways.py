"""The ways in which context-parallel ranks let each query meet all keys, by their number in the
dimension ``context_exchange``."""

# Keys and values go round a ring, while each rank attends to those that it has.
RING = 0
# Each rank gathers all keys and values before it attends.
GATHER = 1
# Ranks exchange tokens for heads before attention, and heads for tokens after it.
HEADS = 2
# What the ways are called.
WORDS = ("ring of keys", "keys gathered", "heads exchanged")
