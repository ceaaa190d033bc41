"""Callbacks that show what a run does. Floor 5."""

from lightning_zero.callbacks.model_state_report import ModelStateReport
from lightning_zero.callbacks.step_time import StepTime

__all__ = ["ModelStateReport", "StepTime"]
