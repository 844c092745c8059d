"""Margin regularization for class-wise performance disparity (MR2, arXiv 2602.00205)."""

import importlib

from mr2_core.losses import MR2Loss, margin_cross_entropy, representation_loss
from mr2_core.margins import class_margins
from mr2_core.statistics import ClassStatistics

# Loaded on first use, so that `import mr2_core` loads torch and nothing heavier.
_ON_FIRST_USE = {"ClassReport": "mr2_core.metrics", "load_dataset": "mr2_core.data"}

__all__ = [
    "ClassReport",
    "ClassStatistics",
    "MR2Loss",
    "class_margins",
    "load_dataset",
    "margin_cross_entropy",
    "representation_loss",
]


def __getattr__(name):
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module 'mr2_core' has no attribute '{name}'")
