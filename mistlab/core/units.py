"""Factors that convert the units of measurement in files to SI base units."""

MIB_BYTES = 2**20
GIB_BYTES = 2**30
GBYTES = 10**9
TFLOP = 10**12
MILLISECONDS = 1e-3
MICROSECONDS = 1e-6
NANOSECONDS = 1e-9
