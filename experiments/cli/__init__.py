"""Shared parts of commands: options, errors, progress, folders of results."""
