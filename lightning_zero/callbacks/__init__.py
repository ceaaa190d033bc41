"""Callbacks that report a run's times, traffic and memory."""

from lightning_zero.callbacks.zero_monitor import ZeroMonitor

__all__ = ["ZeroMonitor"]
