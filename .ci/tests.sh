# shellcheck shell=bash disable=SC2034     # the selections are for the scripts
# Selects and runs the tests of .ci/run and .ci/long.

nextest() {        # nextest ARGUMENTS…: on this machine
  cargo nextest run --locked --all-features --no-fail-fast \
    --tool-config-file "quarantine:$PWD/.config/quarantine.toml" "$@"
}

lab-test() {       # lab-test KERNEL EXPRESSION OPTIONS…: in the lab's guest
  lab/lab setup "$1"
  cargo xtask lab-test -k "$1" --timeout 4700 -E "$2" "${@:3}" -- --no-fail-fast
}

# Nodes of a running cluster must answer within time limits, which they miss on a busy machine.
HOST_MEASURED='binary(=host_cluster) and test(/^host_cluster::stress::/)'

# Tests that measure time (how long another client waits, the cost of a message next to a thousand
# links, failovers, a cluster bus beside large transfers), or repeat for depth (all objects a
# thousand times).
LAB_MEASURED='test(=churn::a_thousand_connections_leave_nothing) or test(/^measured_isolation::/)
  or test(=fabrics::idle_links_cost_nothing) or test(/^agent_lab::(bulk|failover|soak)::/)'
# The basic suites, without the tests in LAB_MEASURED, with one fault of replication by agents, and
# with Redis in transparent mode.
LAB_CORE="(binary(/^lab_(agent|verbs|mem|links|streams|sessions|module|server|metrics)$/)
  or test(/survive_the_loss_of_rdma$/)) and not ($LAB_MEASURED)
  and not test(/^agent_lab::replication::.*(killed_agents|removed_devices)$/)
  and not test(/^agent_lab::transparent::(cluster_of_valkey|sentinels_of)/)"
