"""Engines: the systems that train by a plan, and how each of them differs from the others."""
