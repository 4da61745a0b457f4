"""Hugging Face configurations as models: a table of model types, and the reading of files."""
