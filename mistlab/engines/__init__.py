"""Engines: the training systems that can run a plan, each a value in ``mistlab.engines.engine``."""
