"""The URL of the gateway for every host that it may listen on, and the passed socket."""

import http.client
import threading
from urllib.parse import urlsplit

import pytest

from pipeline.config.load import resolve
from pipeline.supervise import listen_fd
from tools.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_listener_is_reachable_at_its_url(host: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(listen_fd.VARIABLE, "")  # and so removed at the end, also if it was not set
        port = free_port(host)
        server = {"host": host, "port": port}
        config = resolve({"server": server, "auth": {"api_keys": ["sk-one-long-enough"]}}, {})
        held = listen_fd.bind_listener(config)
        assert held is not None
        with held:

            def answer() -> None:
                connection = held.accept()[0]
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            url = urlsplit(listen_fd.url(config))
            assert url.port == port
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
            connection.request("GET", "/ready")
            assert connection.getresponse().status == 204
            connection.close()
            thread.join()
