#!/bin/sh
# Four agents on two hosts, each host a network namespace of this machine (needs root and iproute2).
#
# Prints what each host's agents reached. Each host writes its results to out-a or out-b: shared in it
# may be published, private in it stays on the host.
set -eu
CORN=${CORN:-corn}            # the installed command
WORK=$(mktemp -d)
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=FATAL

ip netns add corn-a
ip netns add corn-b
trap 'ip netns del corn-a; ip netns del corn-b; rm -rf "$WORK"' EXIT
ip link add corn-va netns corn-a type veth peer name corn-vb netns corn-b
ip -n corn-a addr add 10.77.0.1/24 dev corn-va
ip -n corn-b addr add 10.77.0.2/24 dev corn-vb
for host in a b; do
  ip -n corn-$host link set lo up
  ip -n corn-$host link set corn-v$host up
done
STORE=10.77.0.1

# The plan is public, and by default safe against an eavesdropper with one insider. A curious host
# here holds the keys of two agents: plan with --colluders 2 where that matters. Every agent's key
# stays on its host; only public keys travel, in the roster.
cd "$WORK"
"$CORN" plan --graph ring:4 --steps 200 --out plan.corn > plan.txt 2>&1
for host in a b; do mkdir -m 700 keys-$host; done
"$CORN" keys make keys-a --agent 0 2> /dev/null
"$CORN" keys make keys-a --agent 1 2> /dev/null
"$CORN" keys make keys-b --agent 2 2> /dev/null
"$CORN" keys make keys-b --agent 3 2> /dev/null
mkdir public && cp keys-a/*.pub keys-b/*.pub public
"$CORN" keys roster public --out roster.json 2> /dev/null
cp roster.json keys-a; cp roster.json keys-b

run_agent() {  # host's letter, agent's number, address at which neighbours connect
  ip netns exec "corn-$1" "$CORN" agent plan.corn --task breast-cancer --keys "keys-$1" \
    --agent "$2" --store $STORE:29500 --listen "$3" \
    --step-size 0.2 --batch-size 32 --timeout 30 --out "out-$1" > "agent-$2.txt" 2>&1
}
run_agent a 0 10.77.0.1:29600 & AGENTS=$!
run_agent a 1 10.77.0.1:29601 & AGENTS="$AGENTS $!"
run_agent b 2 10.77.0.2:29600 & AGENTS="$AGENTS $!"
run_agent b 3 10.77.0.2:29601 & AGENTS="$AGENTS $!"
for agent in $AGENTS; do wait "$agent" || { cat agent-*.txt; exit 1; }; done
tail -n 3 agent-*.txt
