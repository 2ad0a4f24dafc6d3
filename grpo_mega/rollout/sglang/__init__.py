"""Generation in SGLang: one process of its own for every engine, driven from the ranks that share its GPUs."""
