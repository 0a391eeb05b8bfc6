"""Measurements that need a checkout, other libraries or the right to make networks; their records are in `results`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
