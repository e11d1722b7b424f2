"""Client libraries and frameworks against a server of the demo model: `make test-clients`.

    python -m tools.client_tests PYTHON [ARGUMENTS OF PYTEST]

PYTHON is that of the clients' virtual environment, in which the tests of tests/clients run. The server is that of this
checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys

from pipeline.config.schema import DEMO_MODEL
from tools.bench.http.server_under_test import ROOT, ServerUnderTest

KEY = "client-key"
# Nothing is fetched or reported while the tests run.
_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
_FOLDER = ROOT / "tests" / "clients"


def main(arguments: list[str]) -> int:
    """Start the server, run the tests, and return the exit code of pytest."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    python, *more = arguments
    model = {"name": DEMO_MODEL, "kv_cache_mb": 256}
    with ServerUnderTest(model, sorted(os.sched_getaffinity(0)), {}, {"clients": KEY}) as server:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI_"))},
            **_QUIET,
            "STARLING_CLIENTS_URL": f"http://127.0.0.1:{server.port}",
            "STARLING_CLIENTS_MODEL": DEMO_MODEL,
            "STARLING_CLIENTS_KEY": KEY,
        }
        command = [python, "-m", "pytest", "-q", "-c", str(_FOLDER / "pytest.ini"), f"--rootdir={_FOLDER}"]
        command += [f"--confcutdir={_FOLDER}", "-p", "no:cacheprovider", *(more or [str(_FOLDER)])]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
