"""Layer graphs (the operators, saved tensors and peaks of a model's layers), and the expressions
for stages' memory and work that are built from them.
"""
