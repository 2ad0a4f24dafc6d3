"""Generation in SGLang: each engine runs in a process of its own, driven from the ranks that share its GPUs."""
