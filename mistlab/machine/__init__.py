"""A cluster and its hardware: numbers of datasheets, and numbers measured on the machine."""
