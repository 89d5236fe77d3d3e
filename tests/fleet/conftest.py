"""Fixtures of the tests of replicas and of the server."""

from contextlib import ExitStack

import pytest

from tests.fleet.commands import find_free_port


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


@pytest.fixture
def client():
    """Return a function that makes clients of OpenAI's package. The clients are closed when the test ends."""
    # Import here, because most tests of the folder need no client.
    import openai

    with ExitStack() as clients:

        def connect(port):
            url = f"http://127.0.0.1:{port}/v1"
            return clients.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

        yield connect


@pytest.fixture
def free_port():
    return find_free_port()
