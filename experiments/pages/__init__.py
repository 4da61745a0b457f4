"""What experiments have in common: a folder of rows, tables, charts, and a page."""
