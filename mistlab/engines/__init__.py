"""Training engines: the systems that can run a plan, each described by a value of the class
``Engine``.
"""
