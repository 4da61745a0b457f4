"""How far predictions are from measurements, for tables of measured runs."""
