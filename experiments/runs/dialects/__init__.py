"""Dialects of tables of measured runs: what turns their free text into typed columns."""
