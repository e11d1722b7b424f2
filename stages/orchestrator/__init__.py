"""The orchestrator: one address for a fleet of agents. Pure modules, and stage.py with the I/O.

interfaces.py   NodeManager and RequestRouter, and what they exchange
registry.py     the agents, and how they are
score.py        the estimate by which agents are compared
rates.py        the measured speeds behind it
prefixes.py     which prompts each engine was sent
held_prefixes.py  which of their prefixes it holds, as agents publish it
router.py       the choice of an agent
adapter_hosts.py  which agents may load or serve an adapter
eviction.py     which models and adapters may leave an agent
last_uses.py    when each model and adapter was used last
decisions.py    why each choice was made

front.py        a client's request before it is forwarded: keys, bounds, quotas, its id
read_body.py    checks its body, and reads what routing uses
request_ids.py  ids from which every orchestrator derives the same
relay.py        forwards requests, and moves them when an engine dies
forward.py      a request on its way, and what was tried
kept_requests.py  requests that clients may read again
route_finder.py the agent for the next attempt, and what it waits for
key_claims.py   agreement on the agent of a request with a key
request_locator.py  which engine has a request
unread_answers.py  charges whole answers whose clients have left
handover.py     moves streams of an agent that drains
page_transfers.py  KV pages that agents send each other for them
session_moves.py  sessions of an agent that drains, or is busy
known_sessions.py  which agent has a session
session_cost.py whether a session moves for a turn
session_pages.py  KV pages that are sent with it
prefix_moves.py the prefixes that most of its requests shared
passing.py      the events of one engine, on their way to the client
event_cutter.py whole events of a stream, none lost and none twice
output_record.py  the output tokens of a stream, from which another engine continues
text_stream.py  the text of a stream of another engine, from which another one goes on
opening.py      exchanges that end when their agent is lost
releases.py     tells engines that no one reads a request
catalog_reader.py  what is published
cold_loads.py   loads for requests and placements, one of a model at each agent
leader.py       what the elected orchestrator does
placement.py    the loads that placements need, and the copies that stay
idle_models.py  models that have had no requests for a while
model_changes.py  loads and unloads on agents
store_follower.py  agents, cordons, placements and quotas as the store has them
responses/      responses that all orchestrators share
quotas/         quotas that hold for all orchestrators together
upstream.py     the interface of the HTTP client
http_client.py  that client, with TLS where it is configured: connections that are kept
connecting.py   opens them: to the first address of a host that answers
engine_connection.py  one of them: a request and its response
http_response.py  the bytes of a response
head_facts.py   the fields of a head that every request's handlers use
http_app.py     the routes
probe_routes.py  those for monitoring
text_request.py  reads plain requests for text
text_connection.py  the connections of clients, which send them and others
slots.py        how many requests there may be at once, and bytes of their bodies
event_response.py  the response of a stream to its client
response_routes.py  those of stored responses
conversation_routes.py  those of conversations
fleet_api.py    the fleet for operators
stage.py        the process
"""
