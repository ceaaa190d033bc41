"""Callbacks that report a run's times, traffic and memory."""

from lightning_zero.callbacks.model_state_report import ModelStateReport
from lightning_zero.callbacks.zero_monitor import ZeroMonitor

__all__ = ["ModelStateReport", "ZeroMonitor"]
