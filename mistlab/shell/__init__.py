"""Shell scripts that start training, evaluated without being run."""
