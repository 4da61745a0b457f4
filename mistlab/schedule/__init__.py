"""The schedule of an iteration: which task runs on which stream, and in which order."""
