"""Jobs (the content of plan files), predictions, measurements and searches, as values."""
