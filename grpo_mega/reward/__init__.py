"""Samples -> scores: extraction of the answer, strict format, safe equivalence, and the weighted sum of terms."""
