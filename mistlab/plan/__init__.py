"""What is trained and how - models, workloads, dimensions, stages, plans and search spaces."""
