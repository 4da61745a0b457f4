"""Clusters and the hardware of their nodes: datasheet figures, and figures that were measured."""
