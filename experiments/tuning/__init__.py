"""Commands that search for plans, compare searchers, and explain plans."""
