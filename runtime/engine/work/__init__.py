"""What tasks do: forward and backward passes, copies, collectives and optimizer steps."""
