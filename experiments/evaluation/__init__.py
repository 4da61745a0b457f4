"""The published evaluation: speedups over baselines, step by step and view by view."""
