"""Evaluation from several samples per problem, with confidence intervals; during training and after it."""
