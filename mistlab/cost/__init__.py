"""The costs of plans: times of tasks, stages and pipelines, and memory that no tensor accounts
for.
"""
