"""The container, as far as it can be checked without a daemon: files, user, command and health check."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from para_core.cli.app import run
from para_core.fleet.http import host_server
from tests.fleet import test_server

DEPLOY = Path(__file__).parents[1] / "deploy"
LINES = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["para_core"]
MANIFESTS = {
    (manifest["kind"], manifest["metadata"]["name"]): manifest
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
POD = MANIFESTS["Deployment", "para-core"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def instructions(name):
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(name + " ")]


def test_files_exist_and_the_server_runs_without_root():
    sources = [source for copy in instructions("COPY") for source in copy.split()[:-1]]
    assert {"setup.py", "para_core", "fleet"} <= set(sources)
    assert all((DEPLOY.parent / source).exists() for source in sources)
    assert (DEPLOY / SERVICE["build"]["context"] / SERVICE["build"]["dockerfile"]).is_file()
    last = max(i for i, line in enumerate(LINES) if line.startswith("RUN "))
    users = [(i, line.split()[1]) for i, line in enumerate(LINES) if line.startswith("USER ")]
    assert users[-1][0] > last and users[-1][1].partition(":")[0] not in ("root", "0")


@pytest.mark.parametrize("arguments", [SERVICE["command"], CONTAINER["args"]], ids=["compose", "kubernetes"])
def test_command_of_the_container_starts_a_server(monkeypatch, arguments):
    started = []
    monkeypatch.setattr(host_server, "run_server", lambda *args, **rest: started.append((args, rest)) or 1 / 0)
    monkeypatch.setenv("PARA_CORE_API_KEY", "secret")
    command = json.loads(instructions("ENTRYPOINT")[0])
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    options.pop("--model")  # is on the Hub
    assert command.pop(0) == "para_core"
    assert run([*command, *[word for pair in options.items() for word in pair]]) == 1
    ((_, _, server, _), rest) = started[0]
    assert (rest["host"], rest["port"], server.api_key, str(server.videos)) == ("0.0.0.0", 8000, "secret", "/results")


@pytest.mark.parametrize(("ready", "code", "status"), [(1, 0, 200), (0, 1, 503)])
def test_health_check_and_probes_ask_the_route_that_knows(ready, code, status):
    (line,) = instructions("HEALTHCHECK")
    command = json.loads(line.partition("CMD")[2])
    # The container has a key, which neither sends. A probe sends the address of the pod as its host.
    with test_server.serving(api_key="secret") as (port, backend):
        backend.live = ready
        script = command[2].replace("8000", str(port))
        assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == code
        for name in ("startupProbe", "readinessProbe"):
            path = CONTAINER[name]["httpGet"]["path"]
            assert test_server.ask(port, None, method="GET", path=path, Host="10.0.0.7:8000")[0] == status
