"""Answers before buying: how large KV is, what moving it takes, what a deployment would do. Pure but for files read."""
