"""What holds for every test."""

from hypothesis import settings

# A machine that is busy with other jobs is no failure.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
