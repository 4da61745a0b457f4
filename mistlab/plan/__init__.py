"""Models, workloads, dimensions, stages, plans and search spaces: the inputs of predictions and
searches.
"""
