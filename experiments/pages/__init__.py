"""What experiments share: a folder with result rows, tables, charts, and the page of results."""
