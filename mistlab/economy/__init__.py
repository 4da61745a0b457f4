"""What a training takes in all: days, money, energy, carbon, and time lost to failures."""
