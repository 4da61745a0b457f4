"""The costs of a whole training run: days, bills, time lost to failures, and memory."""
