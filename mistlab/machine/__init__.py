"""A cluster and its hardware: what the datasheet says, and what was measured on it."""
