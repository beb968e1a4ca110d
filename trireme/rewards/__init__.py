"""Rewards: what an answer is worth."""
