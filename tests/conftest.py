"""Settings of all test processes: one compute thread, and the same examples in each CI run."""

import os

import hypothesis

from corn.threads import limit_threads

limit_threads()

# A developer's run draws new examples each time. CI repeats the same ones, so that a failure is due
# to the change under test. Examples have no deadline: the machine may be busy, and benchmarks
# measure speed.
hypothesis.settings.register_profile("corn", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("corn")
