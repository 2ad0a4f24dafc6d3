"""From prompts to samples: the engines that generate completions, and the sampling they share."""
