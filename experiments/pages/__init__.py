"""Parts that experiments share: a folder of result rows, tables, charts, and the page of
results.
"""
