"""Serving by phases: prompts read under one layout, answers decoded under another, on one set of
ranks."""
