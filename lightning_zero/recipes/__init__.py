"""Ordinary Lightning modules and data for examples; nothing here depends on ZeRO."""
