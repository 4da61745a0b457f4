"""Commands that search for plans, compare searchers, and explain why a plan is best."""
