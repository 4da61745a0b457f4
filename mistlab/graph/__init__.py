"""Layer graphs of models, and the expressions for the memory and work of stages made of them."""
