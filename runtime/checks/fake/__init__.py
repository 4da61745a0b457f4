"""A rank on a device without memory, where whatever lets the host wait for the device shows."""
