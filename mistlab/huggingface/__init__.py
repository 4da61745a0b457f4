"""Hugging Face configurations as models: a table of model types, and the reader of files."""
