"""Tables, pictures and HTML pages of plans, steps and runs. They present results and make no decisions."""
