"""First Block Cache: skip transformer blocks in steps in which the first-block residual hardly changes.

The lines below register features of the cache. Each is optional.
"""

import para_core.cache.forecasts
import para_core.cache.graph
import para_core.cache.report  # noqa: F401
