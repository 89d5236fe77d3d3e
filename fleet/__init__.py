"""Generation for many prompts or HTTP requests, on one group of ranks or on several replicas.

Replicas run on Ray, which only ``batch``, ``group`` and ``serving`` import.
"""
