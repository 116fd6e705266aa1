#!/usr/bin/env bash
# One vLLM with the pool, by hand:  examples/vllm_serve.sh MODEL [any option of vllm serve]
# Start it again in a second terminal with another --port: both share what either of them has computed.
set -euo pipefail
model=${1:?usage: vllm_serve.sh MODEL [options of vllm serve]}
shift

stop() { kill $(jobs -p) 2>/dev/null || true; wait; }
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# A node owns the pool's memory. The engines of this host find it by themselves, without an address.
if ! moonpool status --once >/dev/null 2>&1; then
  moonpool node --dram "${DRAM:-1GiB}" --http "${NODE_HTTP:-127.0.0.1:7711}" &
fi

# "recompute": when a block cannot be loaded, the engine computes it, and the request never fails for it.
# The same in short:  moonpool vllm serve MODEL --kv-connector Mooncake
vllm serve "$model" "$@" \
  --kv-transfer-config '{"kv_connector":"Mooncake","kv_role":"kv_both","kv_load_failure_policy":"recompute"}' &
wait $!
