"""All code that imports torch: models, symbolic tracing, profiling, and the execution of plans."""
