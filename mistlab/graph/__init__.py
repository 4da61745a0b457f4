"""Layer graphs: the operators, saved tensors and memory peaks of a model's layers, and the
expressions for a pipeline stage's memory and work that are built from them.
"""
