"""Communication between ranks: agreements, direct exchange, peer memory, shards, and the bytes they cost."""
