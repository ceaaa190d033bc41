"""Starts and ends ranks, lets them agree between steps, and continues interrupted runs."""
