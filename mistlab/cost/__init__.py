"""What tasks cost: durations of single tasks, and of tasks that run side by side."""
