"""The command ``show``: shows finished runs of commands on one page."""
