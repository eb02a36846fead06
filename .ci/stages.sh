# shellcheck shell=bash
# Runs the stages of .ci/run and .ci/long, which source this file. .ci/selftest tests this file.
#
# A stage is a function of the script.  It runs in a process of its own, with a time limit.  It has
# passed only if it returned 0 and its output does not say that a part was left out.  A stage that
# was skipped, was cut short or could not run has not passed.

SCRIPT=$(readlink -f "$0")
LEFT_OUT='SKIPPED|UNFINISHED|LEFT OUT|NOT RUN'   # words that no passed stage may print
CANNOT_RUN=77                                    # a stage's exit code if something is missing
HARD_LIMIT=${HARD_LIMIT:-5400}                   # seconds for all stages
KILL_AFTER=${KILL_AFTER:-30}                     # seconds that a stage has to end after its limit

# The caller's variables must not change which tests run, how often, or what they test.  Variables
# of the lab, such as the place of its kernels, belong to the machine and are kept.
for name in "${!FERRITE_@}" "${!NEXTEST_@}"; do [[ $name == FERRITE_LAB_* ]] || unset "$name"; done
unset name
export CARGO_INCREMENTAL=0 CARGO_NET_RETRY=5 CARGO_TERM_COLOR=never

# ---- for stages ----------------------------------------------------------------------------

cannot_run() {     # cannot_run WHY: stops the stage
  echo "NOT RUN: $*"
  exit $CANNOT_RUN
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# ---- for the scripts -----------------------------------------------------------------------

# The script calls this function with its own arguments, after it has defined its functions.  With
# the arguments `--stage NAME`, this process runs only that stage.
stage_process() {
  [ "${1:-}" = --stage ] || return 0
  "$2"
  exit
}

# begin_stages NAME:LIMIT… -- [WANTED…]: sets WANTED to the stages to run, in the order of NAMEs.
begin_stages() {
  local known=() entry name
  declare -gA LIMIT=() RESULT=() DETAIL=() WALL=() CPU=()
  WANTED=() ALL=() CHILD='' BACKGROUND='' PASSED=0 FAILED=0 FLAKY=0
  while [ "$1" != -- ]; do
    entry=$1; shift
    known+=("${entry%:*}"); LIMIT[${entry%:*}]=${entry#*:}
  done
  shift
  for name; do
    if [ -z "${LIMIT[$name]:-}" ]; then
      echo "no such stage: $name; there are: ${known[*]}" >&2
      exit 2
    fi
  done
  ALL=("${known[@]}")
  for name in "${known[@]}"; do
    if [ $# -eq 0 ] || [[ " $* " == *" $name "* ]]; then WANTED+=("$name"); fi
  done
  LOGS=$PWD/target/ci/$(basename "$SCRIPT")-$$
  mkdir -p "$LOGS"
  trap finish EXIT
  trap 'exit 130' INT TERM HUP
}

run_stage() {      # run_stage NAME: returns 0 only if the stage passed
  local name=$1 begun=$SECONDS before rc=0 limit=${LIMIT[$1]} log=$LOGS/$1.log tee left
  left=$((HARD_LIMIT - SECONDS))
  [ "$limit" -le "$left" ] || limit=$((left > 0 ? left : 1))
  before=$(cpu_seconds)
  printf '\n=== %s\n' "$name"
  exec 3> >(exec tee "$log")
  tee=$!
  # Runs in the background, so that this script handles a signal at once.
  timeout -k "$KILL_AFTER" "$limit" "$BASH" "$SCRIPT" --stage "$name" \
    </dev/null >&3 2>&1 3>&- & CHILD=$!
  exec 3>&-
  wait "$CHILD" || rc=$?
  end_group "$CHILD"
  CHILD=''
  timeout 10 tail --pid="$tee" -s 0.1 -f /dev/null || kill "$tee" 2>/dev/null || true
  judge "$name" $rc "$limit" "$log"
  WALL[$name]=$((SECONDS - begun)) CPU[$name]=$(($(cpu_seconds) - before))
  printf '=== %s: %s, %d s (CPU %d s)\n' "$name" "${RESULT[$name]}" "${WALL[$name]}" "${CPU[$name]}"
  [ "${RESULT[$name]}" = passed ]
}

# Stops processes that a stage left running, such as a guest whose stage was killed.  TERM comes
# first, so that the lab can stop its guest.
end_group() {      # end_group LEADER
  local tenths
  kill -TERM -- "-$1" 2>/dev/null || return 0
  for ((tenths = 0; tenths < 50; tenths++)); do
    kill -0 -- "-$1" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$1" 2>/dev/null || true
}

judge() {          # judge NAME RC LIMIT LOG: sets RESULT, DETAIL and the counts
  local name=$1 rc=$2 log=$4 said
  count "$name" "$log"
  said=$(grep -m1 -E "(^|[^[:alnum:]_])($LEFT_OUT)([^[:alnum:]_]|\$)" "$log" || true)
  case $rc in
    0) RESULT[$name]=passed
       [ -e "$log" ] || RESULT[$name]="FAILED: its output is lost"
       [ -z "$said" ] || RESULT[$name]="FAILED: it says \"${said:0:100}\"";;
    "$CANNOT_RUN") RESULT[$name]="not run: ${said#*NOT RUN: }";;
    124) RESULT[$name]="FAILED: longer than $3 s";;
    *) if [ "$rc" -gt 128 ]; then RESULT[$name]="FAILED: killed by signal $((rc - 128))"
       else RESULT[$name]="FAILED with $rc"; fi;;
  esac
}

# Adds the counts of the last lines of nextest and libtest.
count() {          # count NAME LOG
  local passed failed flaky
  read -r passed failed flaky < <(sed -nE \
      -e 's/^ *Summary \[[^]]*\] .* tests? run: (.*)$/nextest \1/p' \
      -e 's/^test result: [A-Za-z]+\. (.*)$/libtest \1/p' "$2" |
    awk '{
      gsub(/[(),;.]/, " ")
      for (i = 2; i < NF; i++) if ($i ~ /^[0-9]+$/) {
        if ($(i + 1) == "passed") passed += $i
        else if ($(i + 1) ~ /^(failed|timed|exec)$/) failed += $i
        else if ($(i + 1) == "flaky") flaky += $i
      }
    } END {print passed + 0, failed + 0, flaky + 0}')
  PASSED=$((PASSED + passed)) FAILED=$((FAILED + failed)) FLAKY=$((FLAKY + flaky))
  # shellcheck disable=SC2034     # .ci/long writes it down
  [ $((passed + failed)) -eq 0 ] || DETAIL[$1]="$passed passed, $failed failed, $flaky flaky"
}

# Prints the CPU time of all child processes that have ended and were waited for.
cpu_seconds() {    # fields 16 and 17 of the file; the name before them may have spaces
  sed 's/^.*) //' /proc/$$/stat |
    awk -v ticks="$(getconf CLK_TCK)" '{print int(($14 + $15) / ticks)}'
}

in_background() {  # in_background LIMIT COMMAND…: for work that no stage needs yet
  local limit=$1; shift
  nice -n 10 timeout -k 10 "$limit" "$@" >"$LOGS/background.log" 2>&1 </dev/null & BACKGROUND=$!
}

finish() {         # at every exit: prints the table and stops all children
  local rc=$? name ran=0 others=''
  trap '' INT TERM HUP
  [ -z "$CHILD" ] || kill "$CHILD" 2>/dev/null || true
  [ -z "$BACKGROUND" ] || kill "$BACKGROUND" 2>/dev/null || true
  printf '\n%-14s %8s %8s  %s\n' stage seconds CPU result
  for name in "${WANTED[@]}"; do
    case ${RESULT[$name]:-not run} in 'not run'*) ;; *) ran=$((ran + 1));; esac
    # The script fails even if it ignored the result of run_stage.
    [ "${RESULT[$name]:-}" = passed ] || [ $rc -ne 0 ] || rc=1
    printf '%-14s %8s %8s  %s\n' "$name" "${WALL[$name]:--}" "${CPU[$name]:--}" \
      "${RESULT[$name]:-not run}"
  done
  for name in "${ALL[@]}"; do [[ " ${WANTED[*]} " == *" $name "* ]] || others+=" $name"; done
  [ -z "$others" ] || printf '\nnot selected:%s\n' "$others"
  [ $((PASSED + FAILED)) -eq 0 ] ||
    printf '\n%d passed, %d failed, %d flaky\n' "$PASSED" "$FAILED" "$FLAKY"
  [ "$FLAKY" -eq 0 ] || grep -hE '^ +FLAKY ' "$LOGS"/*.log | sort -u || true
  if [ $rc -eq 0 ]; then rm -rf "$LOGS"; else echo "logs: $LOGS"; fi
  printf '%s: %s, %d of %d stages, %d s\n' "$(basename "$SCRIPT")" \
    "$([ $rc -eq 0 ] && echo passed || echo FAILED)" $ran ${#ALL[@]} $SECONDS
  exit $rc
}
