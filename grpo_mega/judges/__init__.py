"""What judges answers and knows nothing of training: the math checker (`math/`) and the sandbox of programs."""
