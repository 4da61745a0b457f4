"""Clusters and their hardware: figures from datasheets, and figures that were measured."""
