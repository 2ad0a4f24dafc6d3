"""Environments: programs that answer the policy in the middle of a completion, such as tools and games."""
