"""Generation for many prompts or HTTP requests, on one group of ranks or on several replicas.

``engine`` drives ranks on this host. Replicas on several hosts run on Ray, which only ``group`` imports.
"""
