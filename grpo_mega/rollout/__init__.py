"""Generation: from prompts to samples, with the engines that generate completions and the sampling they share."""
