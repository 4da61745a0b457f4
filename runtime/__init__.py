"""Everything that touches torch: models, symbolic tracing and (to come) execution on devices."""
