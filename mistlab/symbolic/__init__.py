"""Layer graphs, the expressions that they become, and their evaluation over columns."""
