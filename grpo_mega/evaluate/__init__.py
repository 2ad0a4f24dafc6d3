"""Evaluation from several sampled answers per problem, with confidence intervals; during training and after it."""
