"""The strategies of searchers (the methods by which they search), one in each file."""
