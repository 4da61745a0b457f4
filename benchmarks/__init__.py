"""What takes how long."""
