"""Ways to look for the best plan: one strategy a file."""
