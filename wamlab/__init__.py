"""wamlab: learn, measure and get the training speed-ups of world action models."""
