"""Networks and what belongs to them: the Z-Image transformer, its sampler, and the mini model that ships."""
