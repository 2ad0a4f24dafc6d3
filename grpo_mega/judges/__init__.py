"""Judges of answers, which know nothing of training: the math checker (`math/`), the sandbox of programs, puzzles."""
