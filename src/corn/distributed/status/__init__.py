"""Status of an agent for its operator: log, state file, status server, protected process."""
