"""Settings that every test runs under, and the pool of rank processes."""

import hypothesis

# The same examples every time: a failure in CI is a failure here. The long run draws new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("ci")
