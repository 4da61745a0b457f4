"""Evaluates shell scripts that start training, without running any program, to find the launch
command and its options.
"""
