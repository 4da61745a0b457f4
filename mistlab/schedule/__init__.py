"""The schedule of an iteration: the stream and the order of every task."""
