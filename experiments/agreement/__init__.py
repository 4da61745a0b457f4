"""The closed form against the event simulator."""
