"""One compute thread for every test process, and examples that do not change between CI runs."""

import os

import hypothesis

from corn.threads import limit_threads

limit_threads()

# A developer's run looks for new counterexamples each time; CI repeats the same ones, so that what
# it says about a change is about the change.
# No example has a deadline: the machine may be busy, and speed is for benchmarks.
hypothesis.settings.register_profile("corn", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("corn")
