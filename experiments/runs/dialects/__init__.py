"""Dialects of tables of measured runs: rules that turn free text into typed columns."""
