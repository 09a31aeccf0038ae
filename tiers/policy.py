POLICIES = ("lfu", "lru", "random")
