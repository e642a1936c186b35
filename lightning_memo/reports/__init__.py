"""What people look at: tables, pictures and pages of plans, steps and runs. Nothing here decides anything."""
