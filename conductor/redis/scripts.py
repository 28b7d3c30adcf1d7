"""The Lua scripts that run inside Redis or Valkey.

Each script is one atomic step and one round trip. The keys of a namespace's blocks have the hash
tag `{pool:namespace}`, so that all of them are in one slot of a Cluster. The keys of the whole pool
have the tag `{pool}`.

    ...:blocks    hash   block hash -> ids of its holdings, 4 bytes each
    ...:holdings  hash   id -> tier digit and node id, of the holdings that look-ups may return
    ...:nodes     hash   node id -> epoch, session, ids by tier, ids of the unfinished report
    ...:retired   list   ids of hidden holdings to reclaim, each with the scan's cursor
    ...:ids       the last id; ids are never reused, so a stale id cannot mean another holding
    ...:set:ID    set    the blocks of one holding: the reverse index

A session is one join of a node. Messages of an earlier session or of an earlier epoch are refused.
The members of the pool are in two hashes that every conductor reads and writes in one exchange per
tick. A fence per member has the valid epoch and session.

All keys expire when nobody touches them any more. Values are plain bytes or msgpack.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Script(NamedTuple):
    """A script's Lua source, and the SHA-1 by which Redis finds it."""

    name: str
    source: str
    sha: str


def _script(name: str, *parts: str) -> Script:
    source = "\n".join(parts)
    # Redis names scripts by SHA-1. It protects nothing.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


# KEYS of all index scripts: blocks, holdings, nodes, retired, ids, prefix of the sets.
_INDEX = """
local B, H, N, R, C, S = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local CHUNK = 1000
local function load(node)
  local packed = redis.call('HGET', N, node)
  return packed and cmsgpack.unpack(packed)
end
local function save(node, st) redis.call('HSET', N, node, cmsgpack.pack(st)) end
local function retire(id)
  redis.call('HDEL', H, id)
  redis.call('RPUSH', R, id)
end
local function retire_side(side)
  if side then for _, id in pairs(side) do retire(id) end end
end
local function admit(node, epoch, session, building)
  local st = load(node)
  if st and (st.e > epoch or (st.e == epoch and st.s > session)) then return nil end
  if not st or st.e < epoch then
    if st then retire_side(st.cur); retire_side(st.new) end
    st = {e = epoch, s = session, cur = {}, new = building and {}}
  elseif st.s < session then
    retire_side(st.new)
    st.s, st.new = session, building and {}
  end
  return st
end
local function keep(ttl)
  for i = 1, 5 do redis.call('EXPIRE', KEYS[i], ttl) end
end
local function names_of(packed, from)
  local names = {}
  for at = from, math.min(from + 16 * CHUNK, #packed) - 1, 16 do
    names[#names + 1] = string.sub(packed, at, at + 15)
  end
  return names
end
local function without(ids, id)
  if ids == id then return '' end
  local kept = ''
  for at = 1, #ids, 4 do
    local one = string.sub(ids, at, at + 3)
    if one ~= id then kept = kept .. one end
  end
  return kept
end
local function holds(ids, id)
  for at = 1, #ids, 4 do
    if string.sub(ids, at, at + 3) == id then return true end
  end
  return false
end
local function strike(names, id)
  local held = redis.call('HMGET', B, unpack(names))
  local puts, gone = {}, {}
  for i, name in ipairs(names) do
    local ids = held[i]
    if ids then
      local left = without(ids, id)
      if left == '' then gone[#gone + 1] = name
      elseif left ~= ids then puts[#puts + 1] = name; puts[#puts + 1] = left end
    end
  end
  if #puts > 0 then redis.call('HSET', B, unpack(puts)) end
  if #gone > 0 then redis.call('HDEL', B, unpack(gone)) end
end
"""

# node, epoch, session, is a report under way, ttl
# -> 1, or 0 if the node has a newer epoch or session
BEGIN = _script(
    "begin",
    _INDEX,
    """
local st = admit(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1')
if not st then return 0 end
save(ARGV[1], st)
keep(ARGV[5])
return 1
""",
)

# node, epoch, session, is a report under way, ttl, maximum of blocks, then (kind, tiers, hashes)
# ... -> 1 or 0 (stale), entries, number of blocks above the maximum
APPLY = _script(
    "apply",
    _INDEX,
    """
local node, ttl, limit = ARGV[1], ARGV[5], tonumber(ARGV[6])
local st = admit(node, tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1')
if not st then return {0, 0, 0} end
local dropped, live = 0, nil
local function only_live(ids)
  if not live then
    live = {}
    for _, id in ipairs(redis.call('HKEYS', H)) do live[id] = true end
  end
  local kept = ''
  for at = 1, #ids, 4 do
    local one = string.sub(ids, at, at + 3)
    if live[one] then kept = kept .. one end
  end
  return kept
end
local function store(tier, packed)
  local side = st.new or st.cur
  local id = side[tier]
  if not id then
    id = struct.pack('>I4', redis.call('INCR', C))
    side[tier] = id
    redis.call('HSET', H, id, tier .. node)
    live = nil
  end
  for from = 1, #packed, 16 * CHUNK do
    local names = names_of(packed, from)
    local held = redis.call('HMGET', B, unpack(names))
    local count = redis.call('HLEN', B)
    local puts, adds = {}, {}
    for i, name in ipairs(names) do
      local ids = held[i]
      if not ids and count >= limit then
        dropped = dropped + 1
      elseif not ids then
        count = count + 1
        puts[#puts + 1] = name; puts[#puts + 1] = id
        adds[#adds + 1] = name
      elseif not holds(ids, id) then
        puts[#puts + 1] = name; puts[#puts + 1] = only_live(ids) .. id
        adds[#adds + 1] = name
      end
    end
    if #puts > 0 then
      redis.call('HSET', B, unpack(puts))
      redis.call('SADD', S .. id, unpack(adds))
    end
  end
  redis.call('EXPIRE', S .. id, ttl)
end
local function remove(tiers, packed)
  for _, side in ipairs({st.cur, st.new or {}}) do
    for at = 1, #tiers do
      local id = side[string.sub(tiers, at, at)]
      if id then
        for from = 1, #packed, 16 * CHUNK do
          local names = names_of(packed, from)
          strike(names, id)
          redis.call('SREM', S .. id, unpack(names))
        end
      end
    end
  end
end
local function clear(tiers)
  for _, side in ipairs({st.cur, st.new or {}}) do
    for at = 1, #tiers do
      local tier = string.sub(tiers, at, at)
      if side[tier] then retire(side[tier]); side[tier] = nil end
    end
  end
end
for i = 7, #ARGV, 3 do
  local kind, tiers, packed = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if kind == 'stored' then
    if #packed > 0 then store(tiers, packed) end
  elseif kind == 'removed' then remove(tiers, packed)
  else clear(tiers) end
end
save(node, st)
keep(ttl)
return {1, redis.call('HLEN', B), dropped}
""",
)

# node, epoch, session, ttl
# -> 1: it holds blocks here, 0: it holds none and was dropped, -1: another session's report
END = _script(
    "end",
    _INDEX,
    """
local st = load(ARGV[1])
if not st or st.e ~= tonumber(ARGV[2]) or st.s ~= tonumber(ARGV[3]) then return -1 end
if st.new then
  retire_side(st.cur)
  st.cur, st.new = st.new, false
end
keep(ARGV[4])
if next(st.cur) == nil then
  redis.call('HDEL', N, ARGV[1])
  return 0
end
save(ARGV[1], st)
return 1
""",
)

# node, session
RETIRE = _script(
    "retire",
    _INDEX,
    """
local st = load(ARGV[1])
if not st or st.s > tonumber(ARGV[2]) then return 0 end
retire_side(st.cur); retire_side(st.new)
redis.call('HDEL', N, ARGV[1])
return 1
""",
)

# maximum of entries -> number of holdings left to reclaim, entries
RECLAIM = _script(
    "reclaim",
    _INDEX,
    """
local left = tonumber(ARGV[1])
while left > 0 do
  local entry = redis.call('LINDEX', R, 0)
  if not entry then break end
  local id, cursor = string.sub(entry, 1, 4), string.sub(entry, 5)
  if cursor == '' then cursor = '0' end
  -- Nobody adds to a retired set, so it is scanned without removals and freed as a whole.
  local page = redis.call('SSCAN', S .. id, cursor, 'COUNT', math.min(left, CHUNK))
  local names = page[2]
  for from = 1, #names, CHUNK do
    strike({unpack(names, from, math.min(from + CHUNK - 1, #names))}, id)
  end
  if page[1] == '0' then
    redis.call('LPOP', R)
    redis.call('UNLINK', S .. id)
  else
    redis.call('LSET', R, 0, id .. page[1])
  end
  left = left - math.max(#names, 1)
end
return {redis.call('LLEN', R), redis.call('HLEN', B)}
""",
)

# ttl -> entries, number of holdings left to reclaim
TOUCH = _script(
    "touch",
    _INDEX,
    """
if redis.call('HLEN', B) == 0 then return {0, redis.call('LLEN', R)} end
keep(ARGV[1])
for _, id in ipairs(redis.call('HKEYS', H)) do redis.call('EXPIRE', S .. id, ARGV[1]) end
for _, entry in ipairs(redis.call('LRANGE', R, 0, -1)) do
  redis.call('EXPIRE', S .. string.sub(entry, 1, 4), ARGV[1])
end
return {redis.call('HLEN', B), redis.call('LLEN', R)}
""",
)

# KEYS: blocks, holdings. hashes, look up all of them (1) or the leading run (0)
# -> runs (ids, number of blocks, ...), holdings (id, tier digit and node id, ...), entries
LOOKUP = _script(
    "lookup",
    """
local B, H = KEYS[1], KEYS[2]
local packed, all = ARGV[1], ARGV[2] == '1'
local runs, found, seen = {}, {}, {}
local function is_live(ids)
  local any = false
  for at = 1, #ids, 4 do
    local id = string.sub(ids, at, at + 3)
    local holder = seen[id]
    if holder == nil then
      holder = redis.call('HGET', H, id)
      seen[id] = holder
      if holder then found[#found + 1] = id; found[#found + 1] = holder end
    end
    any = any or holder
  end
  return any
end
local last, count, is_over = nil, 0, false
local size = 16 * 32  -- small at first, so that an unknown chain costs little
local from = 1
while from <= #packed and not is_over do
  local names = {}
  for at = from, math.min(from + size, #packed + 1) - 1, 16 do
    names[#names + 1] = string.sub(packed, at, at + 15)
  end
  local held = redis.call('HMGET', B, unpack(names))
  for i = 1, #names do
    local ids = held[i]
    if ids ~= last or last == nil then
      if not ids or not is_live(ids) then
        if not all then is_over = true; break end
        ids = ''
      end
      if ids ~= last then
        if last then runs[#runs + 1] = last; runs[#runs + 1] = count end
        last, count = ids, 0
      end
    end
    count = count + 1
  end
  from = from + size
  size = 16 * 1000
end
if last then runs[#runs + 1] = last; runs[#runs + 1] = count end
return {runs, found, redis.call('HLEN', B)}
""",
)

# KEYS: fence, spaces of the member. epoch, does a new session begin, ttl
# -> session (0: a newer epoch is known), the known epoch, the namespaces in which it has blocks
JOIN = _script(
    "join",
    """
local known = redis.call('HGET', KEYS[1], 'epoch')
if known and tonumber(known) > tonumber(ARGV[1]) then return {0, known, {}} end
local session
if ARGV[2] == '1' or known ~= ARGV[1] then
  if known ~= ARGV[1] then redis.call('HDEL', KEYS[1], 'draining') end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  session = redis.call('HINCRBY', KEYS[1], 'session', 1)
else
  session = tonumber(redis.call('HGET', KEYS[1], 'session'))
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {session, ARGV[1], redis.call('SMEMBERS', KEYS[2])}
""",
)

# KEYS: fence, spaces of the member. epoch, session, ttl, namespace
# -> 1, or 0 if the node has another epoch or session
ENTER = _script(
    "enter",
    """
local known = redis.call('HMGET', KEYS[1], 'epoch', 'session')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 0 end
redis.call('SADD', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
""",
)

# KEYS: fence of the member. epoch -> 1, or 0 if the member has another epoch
DRAIN = _script(
    "drain",
    """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'draining', '1')
return 1
""",
)

# KEYS: members, fence of the member. id, session -> 1, or 0 if it has joined again since
LEAVE = _script(
    "leave",
    """
local known = redis.call('HGET', KEYS[2], 'session')
if known and tonumber(known) > tonumber(ARGV[2]) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
""",
)

# One exchange: write the reports of this conductor's members, and read those of all members.
# KEYS: nodes, workers, prefix of fences, incarnation, namespace directory, prefix of namespaces,
#   conductors
# ttl, incarnation if there is none, last namespace number, conductor, its record, then
#   (kind, id, epoch, session, record) ...
# -> incarnation, lost members, draining members, nodes, workers, namespaces (number, value, ...),
#   conductors
SYNC = _script(
    "sync",
    """
local ttl = ARGV[1]
redis.call('SET', KEYS[4], ARGV[2], 'NX')
redis.call('HSET', KEYS[7], ARGV[4], ARGV[5])
local lost, draining = {}, {}
for i = 6, #ARGV, 5 do
  local kind, id = ARGV[i], ARGV[i + 1]
  local fence = KEYS[3] .. kind .. ':' .. id
  local known = redis.call('HMGET', fence, 'epoch', 'session', 'draining')
  if known[1] ~= ARGV[i + 2] or known[2] ~= ARGV[i + 3] then
    lost[#lost + 1] = kind .. ':' .. id
  else
    redis.call('HSET', kind == 'node' and KEYS[1] or KEYS[2], id, ARGV[i + 4])
    redis.call('EXPIRE', fence, ttl)
    if known[3] then draining[#draining + 1] = kind .. ':' .. id end
  end
end
for _, i in ipairs({1, 2, 4, 5, 7}) do redis.call('EXPIRE', KEYS[i], ttl) end
local added = {}
local numbered = redis.call(
  'ZRANGEBYSCORE', KEYS[5], '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, 500)
for i = 1, #numbered, 2 do
  local value = redis.call('GET', KEYS[6] .. numbered[i])
  if value then
    added[#added + 1] = numbered[i + 1]; added[#added + 1] = value
  else
    redis.call('ZREM', KEYS[5], numbered[i])
  end
end
return {redis.call('GET', KEYS[4]), lost, draining, redis.call('HGETALL', KEYS[1]),
        redis.call('HGETALL', KEYS[2]), added, redis.call('HGETALL', KEYS[7])}
""",
)

# KEYS: namespace, its owner, directory, last number. id, value, layout, ttl, maximum of namespaces
# -> the known layout of its owner
REGISTER = _script(
    "register",
    """
local known = redis.call('GET', KEYS[2])
if known and known ~= ARGV[3] then return known end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
  redis.call('ZADD', KEYS[3], redis.call('INCR', KEYS[4]), ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - tonumber(ARGV[5]))
end
redis.call('EXPIRE', KEYS[3], ARGV[4])
redis.call('EXPIRE', KEYS[4], ARGV[4])
return ARGV[3]
""",
)
