"""Attention by others: one adapter for each peer, which the doctor examines and the bench races.

An adapter is prepared once from plain numbers and then called with tensors in canonical layout. The package of a peer is looked
for when that peer is asked, never at import.
"""
