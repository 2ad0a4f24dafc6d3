"""Memory, time and layouts before a job is queued: what a rank holds during training, and what its engine may take."""
