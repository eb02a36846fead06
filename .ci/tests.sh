# shellcheck shell=bash disable=SC2034     # LAB_CORE and LAB_MEASURED are for the scripts
# Which tests .ci/run and .ci/long run, and how.

nextest() {        # nextest ARGUMENTS…: on this machine
  cargo nextest run --locked --all-features --no-fail-fast \
    --tool-config-file "quarantine:$PWD/.config/quarantine.toml" "$@"
}

lab-test() {       # lab-test KERNEL EXPRESSION OPTIONS…: in the lab's guest
  lab/lab setup "$1"
  cargo xtask lab-test -k "$1" --timeout 4700 -E "$2" "${@:3}" -- --no-fail-fast
}

# What is measured (how long another client waits, what a message costs beside a thousand links) or
# repeated for depth (a thousand lives).
LAB_MEASURED='test(=churn::a_thousand_lives_leave_nothing) or test(/^others_beside::/)
  or test(=fabrics::idle_links_cost_nothing)'
# What everything else stands on, without that.
LAB_CORE="binary(/^lab_(verbs|mem|links|streams|sessions|module|server)$/) and not ($LAB_MEASURED)"
