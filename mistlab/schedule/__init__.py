"""When everything happens in an iteration: which task runs on which stream, in which order."""
