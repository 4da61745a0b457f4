"""Runs torch models with symbolic sizes, without a GPU and without memory for tensors, to derive
layer graphs.
"""
