"""Generation for many prompts or HTTP requests, on one group of ranks or on several replicas.

Replicas run on Ray, which only ``group`` and ``serving`` import.
"""
