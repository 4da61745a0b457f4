"""Studies of data parallelism that communicates less: what it costs, and how accurately it
trains.
"""
