"""Every test process computes with one thread: see corn.threads."""

from corn.threads import limit_threads

limit_threads()
