#!/bin/sh
# Entry point of the container.
#
#   agent [OPTION...]   make a key if there is none, wait for the roster, and run the agent
#   keys                make a key if there is none, and publish its public half
#   roster              wait for the public keys of all agents, and make the roster
#   COMMAND...          any other command of corn
#
# Environment:
#   CORN_AGENT    number of the agent (default: the number at the end of the host's name)
#   CORN_AGENTS   number of agents, for roster
#   CORN_KEYS     private folder of key, roster and ledgers (default: /var/lib/corn/keys)
#   CORN_OUT      folder of the run (default: /var/lib/corn/out)
#   CORN_PLAN     the plan (default: /etc/corn/plan.corn)
#   CORN_OPTIONS  file with options of corn agent (default: /etc/corn/agent.options)
#   CORN_PUBLIC   folder of public keys and roster.json, which all agents see (default: /public)
#   CORN_ADVERTISE  HOST:PORT at which neighbours reach this agent (default: host's name, port 29600)
#   CORN_AGAIN    option of an agent that was in the run before: --rejoin (the default, while the others
#                 go on) or --resume (after all have stopped)
#   CORN_WAIT     seconds to wait for the roster and for public keys (default: 600)
set -eu
umask 077

KEYS=${CORN_KEYS:-/var/lib/corn/keys}
OUT=${CORN_OUT:-/var/lib/corn/out}
PLAN=${CORN_PLAN:-/etc/corn/plan.corn}
OPTIONS=${CORN_OPTIONS:-/etc/corn/agent.options}
PUBLIC=${CORN_PUBLIC:-/public}
WAIT=${CORN_WAIT:-600}

fail() {
  echo "corn: $*" >&2
  exit 1
}

find_agent() {
  AGENT=${CORN_AGENT:-$(hostname | sed -n 's/^.*-\([0-9][0-9]*\)$/\1/p')}
  case $AGENT in
    '' | *[!0-9]*) fail "the number of the agent is unknown: set CORN_AGENT" ;;
  esac
}

make_key() {
  mkdir -p "$KEYS" # with mode 700, by the umask; the agent refuses a folder that others may use
  [ -e "$KEYS/agent-$AGENT.key" ] || corn keys make "$KEYS" --agent "$AGENT"
  # Under a temporary name first: a reader sees the whole key or none.
  if [ -w "$PUBLIC" ] && [ ! -e "$PUBLIC/agent-$AGENT.pub" ]; then
    cp "$KEYS/agent-$AGENT.pub" "$PUBLIC/agent-$AGENT.pub.part"
    chmod 644 "$PUBLIC/agent-$AGENT.pub.part"
    mv "$PUBLIC/agent-$AGENT.pub.part" "$PUBLIC/agent-$AGENT.pub"
  fi
}

wait_for() { # a file
  waited=0
  while [ ! -e "$1" ]; do
    [ "$waited" -lt "$WAIT" ] || fail "$1: is not there after $WAIT s"
    sleep 1
    waited=$((waited + 1))
  done
}

make_roster() {
  number=0
  while [ "$number" -lt "${CORN_AGENTS:?set CORN_AGENTS}" ]; do
    wait_for "$PUBLIC/agent-$number.pub"
    number=$((number + 1))
  done
  [ ! -e "$PUBLIC/roster.json" ] || exit 0
  corn keys roster "$PUBLIC" --out "$PUBLIC/roster.json.part"
  chmod 644 "$PUBLIC/roster.json.part"
  mv "$PUBLIC/roster.json.part" "$PUBLIC/roster.json"
}

case ${1:-agent} in
  agent)
    [ $# -eq 0 ] || shift
    find_agent
    make_key
    # A roster that the agent holds is never replaced: it is the root of trust.
    if [ ! -e "$KEYS/roster.json" ]; then
      wait_for "$PUBLIC/roster.json"
      cp "$PUBLIC/roster.json" "$KEYS/roster.json"
    fi
    # A run that is done would be refused, and an orchestrator would start the agent again and again.
    if [ -e "$OUT/done" ]; then
      echo "corn: the run is complete; remove $OUT/done to start another one" >&2
      exec sleep infinity
    fi
    # The agent keeps the addresses of a run when it takes part in it, or came too late for its start.
    if [ -e "$OUT/private/agent-$AGENT/addresses.json" ]; then
      case " $* " in
        *" --resume "* | *" --rejoin "*) ;;
        *) set -- "$@" "${CORN_AGAIN:---rejoin}" ;;
      esac
    fi
    export CORN_KEYS="$KEYS"
    # Read before the agent starts, so that a missing file ends the script.
    options=$(sed '/^ *#/d' "$OPTIONS")
    set -f # options are words, not patterns of files
    # shellcheck disable=SC2086
    corn agent "$PLAN" $options --agent "$AGENT" --out "$OUT" \
      --advertise "${CORN_ADVERTISE:-$(hostname):29600}" "$@" &
    child=$!
    # A shell ignores signals while it waits: they are passed on, and the agent stops with the others.
    trap 'signalled=yes; kill -TERM "$child" 2>/dev/null || true' TERM INT
    signalled=yes
    while [ -n "$signalled" ]; do # a signal ends the wait, but not the agent
      signalled=
      code=0
      wait "$child" || code=$?
    done
    [ "$code" -ne 0 ] || touch "$OUT/done"
    exit "$code"
    ;;
  keys)
    find_agent
    make_key
    ;;
  roster) make_roster ;;
  *) exec corn "$@" ;;
esac
