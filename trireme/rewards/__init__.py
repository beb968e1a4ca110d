"""Rewards: functions that score answers."""
