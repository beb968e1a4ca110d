"""Losses, advantages and algorithms beyond the dozen that most runs train with."""
