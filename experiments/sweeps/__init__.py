"""Many tuning problems at once: the file that lists them, the workers that solve them, the page."""
