"""Problems (a model, a batch, a cluster) on which plans and searchers are compared, and predictions
for them.
"""
