"""The schedule of an iteration: which tasks a pipeline's stages run, in which order and on which
stream.
"""
