"""The steps of an examination: settle conventions, compare, probe, look inside, explain, judge."""
