"""Generation for many prompts or HTTP requests, on one group of ranks or on several replicas.

``engine`` drives ranks on this host. Only ``group`` and ``ray_cluster``, for replicas on several hosts, need Ray.
"""
