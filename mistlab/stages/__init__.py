"""What the stages of a plan run - their columns, passes, tasks and buffers."""
