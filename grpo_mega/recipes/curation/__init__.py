"""Data chosen for training: samples that are selected, preferred or labelled, and problems without duplicates."""
