"""From checkpoints to stores: names, conversion, the cache, verification."""
