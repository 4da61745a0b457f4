"""What data parallelism costs that communicates less, and what it learns."""
