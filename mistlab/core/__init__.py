"""Values that check their fields and the errors that they raise, files, units, and array types."""
