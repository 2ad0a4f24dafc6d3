"""Scores of samples: extraction of the answer, strict format, safe equivalence, and the weighted sum of terms."""
