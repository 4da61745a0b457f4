"""Everything that touches torch: models, symbolic tracing, profiling and the execution of plans."""
