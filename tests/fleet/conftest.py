"""Fixtures of the tests of replicas and of the server."""

from contextlib import ExitStack

import pytest


@pytest.fixture
def client():
    """Return a function that makes clients of OpenAI's package. The clients are closed when the test ends."""
    # Import here, because most tests of the folder need no client.
    import openai

    with ExitStack() as clients:

        def connect(port, key="none"):
            return clients.enter_context(
                openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
            )

        yield connect
