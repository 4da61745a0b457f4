"""Studies: commands that answer one question each, with a table, a picture and a page."""
