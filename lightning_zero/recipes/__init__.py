"""Ordinary Lightning code to train: nothing in here knows of ZeRO."""
