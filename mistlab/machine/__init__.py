"""Clusters and their hardware: datasheet figures, and figures measured on the machine."""
