"""Reads Hugging Face configurations (``config.json``) as models: the table of model types, and the
reader of files.
"""
