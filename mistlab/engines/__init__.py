"""Engines: the systems that can train by a plan, one row each in ``mistlab.engines.engine``."""
