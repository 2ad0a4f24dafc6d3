"""A module of rewards that nobody can import."""

import sys

sys.exit(0)
