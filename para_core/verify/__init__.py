"""Show that a parallel model equals the unmodified one: :func:`check_parallel`, and ``verify=True``."""
