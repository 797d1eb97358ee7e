"""All that happens before the first step: keys, rendezvous, plan, agreement, links."""
