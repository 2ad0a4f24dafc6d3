"""A reward that differs from sample to sample."""


def by_length(sample):
    return len(sample.token_ids) / 10 - 0.5
