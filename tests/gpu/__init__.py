"""Needs CUDA. Without it no module of this package is collected, and the summary says so in one line."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
