"""Training loops. They are given a Booster and never know which plugin is in it."""
