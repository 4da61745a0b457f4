"""Reads Hugging Face configurations as models: the table of model types, and the reader of
files.
"""
