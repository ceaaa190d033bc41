"""Who starts the ranks, what they agree on between steps, and how a run that was ended goes on."""
