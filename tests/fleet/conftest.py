"""Fixtures of the tests of replicas and of the server."""

from contextlib import ExitStack

import pytest


@pytest.fixture(scope="session")
def served():
    """Return a function that returns port and backend of a server. Calls with the same options share one server."""
    from diffusers import FluxKontextPipeline

    from tests.fleet.test_server import serving

    servers = {}
    with ExitStack() as stack:

        def serve(pipeline=FluxKontextPipeline, **options):
            key = (pipeline, *sorted(options.items()))
            if key not in servers:
                servers[key] = stack.enter_context(serving(pipeline=pipeline, **options))
            return servers[key]

        yield serve
