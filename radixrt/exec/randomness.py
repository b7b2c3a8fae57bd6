"""Randomness keyed by position: a sample's numbers depend on its seed alone, not on what else runs."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Scramble 64 bits. Source: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Give a number in [0, 1) for one token of one sample. Pure."""
    state = seed & _MASK
    for word in (sample_index, position):
        state = _mix((state + _GAMMA * (word + 1)) & _MASK)
    return (_mix((state + _GAMMA) & _MASK) >> 11) * 2.0**-53
