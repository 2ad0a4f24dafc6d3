"""Generation in SGLang: each engine runs in a separate process, driven by the ranks that share its GPUs."""
