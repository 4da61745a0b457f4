"""Measures GPUs and links of a machine, and fits hardware files to the measurements."""
