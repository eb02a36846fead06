# shellcheck shell=bash disable=SC2034     # LAB_CORE is for the scripts
# Which tests .ci/run and .ci/long run, and how.

nextest() {        # nextest ARGUMENTS…: on this machine
  cargo nextest run --locked --all-features --no-fail-fast \
    --tool-config-file "quarantine:$PWD/.config/quarantine.toml" "$@"
}

lab-test() {       # lab-test KERNEL EXPRESSION OPTIONS…: in the lab's guest
  lab/lab setup "$1"
  cargo xtask lab-test -k "$1" --timeout 4700 -E "$2" "${@:3}" -- --no-fail-fast
}

# What everything else stands on, without what is measured (how long another client waits) or
# repeated for depth (a thousand lives).
LAB_CORE='binary(/^lab_(verbs|mem|links|streams|sessions|module|server)$/)
  and not test(=churn::a_thousand_lives_leave_nothing) and not test(/^others_beside::/)'
