"""`px.parallel.pipeline`: models in stages, and schedules for them."""
