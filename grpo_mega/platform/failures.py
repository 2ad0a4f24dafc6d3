"""Errors of one rank that others report; torch is not needed to raise them."""

from __future__ import annotations


class FailedOutside(RuntimeError):
    """Code or a service of the user's failed; the message has its stack, and a stack of ours would hide it."""


class FailedElsewhere(Exception):
    """Cause of an error on a rank whose own work succeeded: the work failed on other ranks."""
