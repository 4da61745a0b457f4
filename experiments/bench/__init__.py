"""Problems on which plans and searches are compared, and their predictions."""
