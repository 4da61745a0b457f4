"""The command ``show``: finished runs of commands on one page."""
