"""Data made of samples: selected, preferred, labelled."""
