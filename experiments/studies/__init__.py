"""Studies: commands that each answer one question, with a table, a picture and a page."""
