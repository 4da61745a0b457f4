"""Layer graphs of models, and the expressions for stages' memory and work that are built from
them.
"""
