"""What runs take in all: days, bills, failures, and whether they fit at all."""
