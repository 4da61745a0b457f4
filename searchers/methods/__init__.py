"""The strategies of searchers, one in each file."""
