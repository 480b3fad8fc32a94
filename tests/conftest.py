"""What all tests share: generated examples are not timed (machines differ), and leave no files in the checkout."""

from hypothesis import settings

settings.register_profile("tuneship", deadline=None, database=None)
settings.load_profile("tuneship")
