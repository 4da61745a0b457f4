"""What tasks run: forward and backward passes, copies, collectives and optimizer steps."""
