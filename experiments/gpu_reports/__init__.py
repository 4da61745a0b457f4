"""GPU reports: plans measured on a GPU or a node, beside predictions."""
