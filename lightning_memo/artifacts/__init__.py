"""Documents that travel between the stages: costs, traces, plans and timelines, each with `save` and `load`."""
