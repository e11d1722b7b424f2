"""The Lua script of the store on Redis, which the server runs as one step.

    meta        run id of the server, era, revision, revision of the last event that is not kept, bytes of the events
    items       value by key                    revisions   "REVISION LEASE" by key
    names       all keys, in order              held        "LEASE KEY", in order
    leases      "TTL_MS RENEWALS" by lease      events      stream: entry REVISION-N is the Nth change of a transaction

Redis has no clock for leases that cannot jump: a lease ends when a client that has seen it unchanged for its time asks
for that, if it is still unchanged then.

An *era* is a time in which the server has lost nothing.  The first call after a loss begins another one, with a
revision that is greater than all before: the server's time in microseconds, or what a client has seen if that is more.
"""

from __future__ import annotations

FOREVER_MS = 10**12

SCRIPT = r"""
local meta, items, revisions, names, held, leases, events = unpack(KEYS)
local taken = 0
local function take()
  taken = taken + 1
  return ARGV[taken]
end
local function number() return tonumber(take()) end
local function text(value) return string.format('%.0f', value) end

-- The life of the server, and what it has lost.

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local caller_run, caller_era, is_durable, seen, observed_ms = take(), take(), take(), number(), number()
local max_events, max_bytes, wants_leases = number(), number(), take()
if caller_run ~= run then return {'life', run, ''} end

local state = redis.call('HMGET', meta, 'run', 'era', 'durable', 'revision', 'forgotten', 'settled_ms', 'bytes')
local era, revision, forgotten = state[2], tonumber(state[4] or 0), tonumber(state[5] or 0)
local settled_ms, bytes = tonumber(state[6] or 0), tonumber(state[7] or 0)
local is_new, is_restarted = not state[4], state[1] ~= run
local was_durable = is_new or state[3] == '1'
local has_lost = seen > revision or ((is_new or is_restarted) and not (is_durable == '1' and was_durable))
if is_new or has_lost then
  local time = redis.call('TIME')
  revision = math.max(revision, seen, time[1] * 1000000 + time[2]) + 1
  era = text(revision)
  redis.call('DEL', events)
  redis.call('HSET', meta, 'era', era, 'revision', era, 'forgotten', era, 'bytes', 0,
    'settled_ms', has_lost and '0' or FOREVER)
end
if is_new or is_restarted or has_lost then
  redis.call('HSET', meta, 'run', run, 'durable', is_durable)
elseif state[3] == '1' and is_durable == '0' then
  redis.call('HSET', meta, 'durable', '0')
end
if caller_era ~= era then
  -- A client knows an earlier era: what began this one was no new store, though nothing has shown that then.
  if caller_era ~= '' and settled_ms == tonumber(FOREVER) then redis.call('HSET', meta, 'settled_ms', 0) end
  return {'life', run, era}
end

-- Changes.

local function revision_of(key)
  local known = redis.call('HGET', revisions, key)
  return known and string.match(known, '^%d+') or '0'
end

local function forget()
  while bytes > max_bytes or redis.call('XLEN', events) > max_events do
    local first = redis.call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
    redis.call('XDEL', events, first[1])
    bytes = bytes - #first[2][2] - #(first[2][4] or '')
    forgotten = tonumber(string.match(first[1], '^%d+'))
  end
end

local function apply(changes) -- each {key, value or false, lease}
  local count = 0
  for _, change in ipairs(changes) do
    local key, value, lease = change[1], change[2], change[3]
    local known = redis.call('HGET', revisions, key)
    if value or known then
      if count == 0 then revision = revision + 1 end
      local before = known and string.match(known, ' (.+)$')
      if before then redis.call('ZREM', held, before .. ' ' .. key) end
      local entry = text(revision) .. '-' .. count
      if value then
        redis.call('HSET', items, key, value)
        redis.call('HSET', revisions, key, text(revision) .. ' ' .. lease)
        redis.call('ZADD', names, 0, key)
        if lease ~= '' then redis.call('ZADD', held, 0, lease .. ' ' .. key) end
        redis.call('XADD', events, entry, 'k', key, 'v', value)
      else
        redis.call('HDEL', items, key)
        redis.call('HDEL', revisions, key)
        redis.call('ZREM', names, key)
        redis.call('XADD', events, entry, 'k', key)
      end
      bytes = bytes + #key + #(value or '')
      count = count + 1
    end
  end
  if count > 0 then
    forget()
    redis.call('HSET', meta, 'revision', text(revision), 'forgotten', text(forgotten), 'bytes', bytes)
  end
end

local function finish(lease)
  redis.call('HDEL', leases, lease)
  local changes = {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', held, '[' .. lease .. ' ', '(' .. lease .. '!')) do
    changes[#changes + 1] = {string.sub(member, #lease + 2), false, ''}
  end
  apply(changes)
end

local function reply(...)
  local all = wants_leases == '1' and redis.call('HGETALL', leases) or false
  return {'ok', text(revision), all, ...}
end

for _ = 1, number() do
  local lease, entry = take(), take()
  if redis.call('HGET', leases, lease) == entry then finish(lease) end
end

-- Operations.

local function below(prefix)
  local rows = {}
  local first, last = '-', '+'
  if prefix ~= '' then first, last = '[' .. prefix, '(' .. prefix .. '\255' end
  for _, key in ipairs(redis.call('ZRANGEBYLEX', names, first, last)) do
    rows[#rows + 1] = {key, redis.call('HGET', items, key), revision_of(key)}
  end
  return rows
end

local operation = take()

if operation == 'get' then
  local key = take()
  return reply(redis.call('HGET', items, key), revision_of(key))

elseif operation == 'scan' then
  return reply(below(take()))

elseif operation == 'updates' then
  local prefix, after = take(), number()
  if after < forgotten or after > revision then return reply('snapshot', below(prefix)) end
  local rows = {}
  if after < revision then
    for _, entry in ipairs(redis.call('XRANGE', events, text(after + 1) .. '-0', '+')) do
      local key = entry[2][2]
      if string.sub(key, 1, #prefix) == prefix then
        rows[#rows + 1] = {key, entry[2][4] or false, string.match(entry[1], '^%d+')}
      end
    end
  end
  return reply('changes', rows)

elseif operation == 'grant' then
  local lease, entry = take(), take() .. ' 0'
  redis.call('HSET', leases, lease, entry)
  return reply(entry)

elseif operation == 'renew' then
  local lease = take()
  local known = redis.call('HGET', leases, lease)
  if not known then return reply(false) end
  local ttl, renewals = string.match(known, '^(%d+) (%d+)$')
  local entry = ttl .. ' ' .. text(renewals + 1)
  redis.call('HSET', leases, lease, entry)
  return reply(entry)

elseif operation == 'revoke' then
  finish(take())
  return reply()

elseif operation == 'transact' then
  for _ = 1, number() do
    local key, wanted = take(), take()
    if revision_of(key) ~= wanted then return reply('no') end
  end
  local changes, wait_ms = {}, 0
  for index = 1, number() do
    local key, is_value, value, lease, is_own = take(), take(), take(), take(), take()
    changes[index] = {key, is_value == '1' and value, lease}
    if lease ~= '' then
      local known = redis.call('HGET', leases, lease)
      if not known then return reply('no') end
      local ttl_ms = tonumber(string.match(known, '^%d+'))
      if is_own == '0' and revision_of(key) == '0' then wait_ms = math.max(wait_ms, ttl_ms) end
    end
  end
  if wait_ms > settled_ms then
    if wait_ms > observed_ms then return reply('wait', text(wait_ms - observed_ms)) end
    redis.call('HSET', meta, 'settled_ms', text(observed_ms))
  end
  apply(changes)
  return reply('yes')
end
return redis.error_reply('unknown operation ' .. operation)
""".replace("FOREVER", f"'{FOREVER_MS}'")
