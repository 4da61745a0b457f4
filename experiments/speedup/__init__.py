"""Systems measured side by side: their grids, trials and results."""
