"""What ranks say to each other: agreements, direct exchange, peer memory, shards, and what it all costs."""
