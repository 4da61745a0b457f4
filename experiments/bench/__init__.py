"""Problems (a model, a batch and a cluster) on which plans and searchers are compared, and
predictions of plans for them.
"""
