"""Runs a rank on a stand-in device without memory, and records where its host would wait for a
GPU.
"""
