"""Measurements that the README quotes, each against what users have today, as ratios within one run."""
