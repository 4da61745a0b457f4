"""Reads models from Hugging Face's ``config.json`` files, for the model types in a table."""
