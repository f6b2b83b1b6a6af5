"""The one door to names that torch and Triton keep to themselves: nothing else in the package may use one.

Each stands in a table with what is slower without it, and has a way that uses public names only. `backlight info` shows what
is missing; tests/test_private.py takes each name away in turn.
"""
