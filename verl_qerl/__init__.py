"""Quantization-enhanced reinforcement learning for verl."""

__version__ = "0.1.0"
