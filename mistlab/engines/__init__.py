"""Engines: the systems that train by a plan, one row each in ``mistlab.engines.table``."""
