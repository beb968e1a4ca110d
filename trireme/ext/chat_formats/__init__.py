"""Formats in which models of families other than Hermes write tool calls (gpt-oss, DeepSeek, Llama
...).
"""
