"""Data parallelism that communicates less: who averages with whom, how often, how compressed."""
