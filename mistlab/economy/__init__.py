"""The total cost of a training: days, money, energy, carbon, and time lost to failures."""
