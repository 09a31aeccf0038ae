"""Reading checkpoints (config, safetensors headers, shards) and converted stores."""
