"""Starting and ending ranks, their agreement between steps, and restarting a run that was ended."""
