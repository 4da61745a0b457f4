"""The total cost of a training run: days, money, energy, carbon, and time lost to failures."""
