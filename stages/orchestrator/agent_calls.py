"""Calls of the agents' API, in which both sides prove that they have the agent's token. Without sockets."""

from __future__ import annotations

import asyncio

from pipeline.api.json_body import CONTENT_TYPE
from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.fleet import host_token, proof
from pipeline.fleet.records import AgentRecord
from stages.orchestrator.forward import read_error
from stages.orchestrator.upstream import Client, Unreachable, read_whole


class AgentCalls:
    """One per orchestrator. `numbers`: of the valid token, by agent, as the store has them."""

    def __init__(self, client: Client, secret: str) -> None:
        self.numbers: dict[str, int] = {}
        self._client = client
        self._secret = secret

    def token_of(self, record: AgentRecord) -> str:
        """The token that the agent says it has. Raises `ModelUnavailable` for one that a newer token has replaced."""
        valid = self.numbers.get(record.agent_id, 0)
        if not record.token_number:
            return self._secret
        if record.token_number < valid:
            raise ModelUnavailable(
                f"agent {record.agent_id} has token {record.token_number}, and token {valid} has replaced it: put the "
                "new one into its file fleet.token"
            )
        return host_token.make(self._secret, record.agent_id, record.token_number)

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer's body. Raises `StarlingError`: the agent's, or `ModelUnavailable`."""
        token, url = self.token_of(record), record.url + path
        authorization, nonce = proof.sign_request(token, "POST", url, body)
        headers = {"Authorization": authorization, "Content-Type": CONTENT_TYPE}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.open("POST", url, headers, body)
                try:
                    raw = await read_whole(answer)
                finally:
                    answer.close()
        except TimeoutError:
            raise ModelUnavailable(f"{url} has not answered within {timeout_s:g} s") from None
        except Unreachable as error:
            raise ModelUnavailable(f"{url}: {error}") from None
        code, message = read_error(raw) if answer.status not in (200, 202) else ("", "")
        if not proof.is_answer(answer.headers.get(proof.HEADER, ""), token, nonce, answer.status, raw):
            why = f" ({message})" if message else ""
            raise ModelUnavailable(
                f"{url} does not prove that it has the token of agent {record.agent_id}{why}; its file fleet.token "
                "needs the fleet's token, or the one that `starling fleet token` prints"
            )
        if answer.status not in (200, 202):
            raise StarlingError(code or "INTERNAL", message or f"{url} answers with {answer.status}")
        return raw
