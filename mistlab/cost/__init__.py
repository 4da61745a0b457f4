"""The costs of plans: times of single tasks, stages and pipelines, and memory beyond tensors."""
