"""The stages of a plan: their columns, passes, tasks and buffers."""
