"""From a profiled step, or an earlier plan, to the plan that says which activations are swapped."""
