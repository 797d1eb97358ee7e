"""Records of a run: journal, files, and the result that an agent returns."""
