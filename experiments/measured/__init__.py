"""Tables of measured runs held against predictions."""
