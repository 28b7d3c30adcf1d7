"""Sizes a deployment before it is bought: how large KV is, how long moving it takes, how fast a GPU is."""
