"""Tiny models and pipelines, and two small trained ones: for tests, benchmarks, examples and the offline default."""
