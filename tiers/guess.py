GUESS_KINDS = ("cross-layer", "previous", "none")
