"""The defects, grouped by what they get wrong. `catalogue` joins the groups."""
