"""The work of tasks: forward and backward passes, copies, collectives and optimizer steps."""
