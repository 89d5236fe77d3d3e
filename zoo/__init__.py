"""Tiny models and pipelines, and two small trained pipelines: for tests, benchmarks, examples and the offline
default.
"""
