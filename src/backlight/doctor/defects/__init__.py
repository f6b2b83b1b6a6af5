"""The defects, grouped by what they get wrong. `doctor.catalogue` joins the groups."""
