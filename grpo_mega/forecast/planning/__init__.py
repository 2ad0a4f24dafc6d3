"""Memory and layouts before anybody queues: what a rank holds while it trains, and what its engine may have."""
